"""python -m nrgpt, as torchrun -m nrgpt starts it."""

from .cli import main

if __name__ == "__main__":
    main()
