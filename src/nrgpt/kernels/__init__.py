"""Operations that deserve more than one implementation. Each file is one seam."""
