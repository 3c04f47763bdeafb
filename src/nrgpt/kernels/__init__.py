"""Operations with more than one implementation, and the choice between them."""
