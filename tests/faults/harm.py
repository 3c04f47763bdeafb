"""Damage, at random but the same every time."""

import random

PIECES = (b"[", b"]", b"{", b"}", b'"', b",", b":", b"null", b"-1", b"1e999", b"NaN", b"\xff",
          b"\x00", b"\n", b"../", b"9" * 30, b"[" * 2000, b"\\ud800", b"true", b'""')  # fmt: skip


def mutated(content: bytes, number: int) -> bytes:
    """The number-th mutation of a file."""
    draw = random.Random(number)
    data = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        at = draw.randrange(len(data) + 1)
        match draw.randrange(6):
            case 0 if at < len(data):
                data[at] ^= 1 << draw.randrange(8)
            case 1:
                del data[at : at + draw.choice((1, 3, 50))]
            case 2:
                data[at:at] = draw.choice(PIECES)
            case 3:
                end = min(len(data), at + draw.randrange(1, 40))
                data[at:at] = data[at:end]
            case 4:
                data[at : at + draw.randrange(1, 8)] = draw.choice(PIECES)
            case 5 if draw.random() < 0.2:
                del data[at:]
    return bytes(data)
