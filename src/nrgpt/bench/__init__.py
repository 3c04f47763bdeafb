"""Measure speed and memory: `nrgpt bench`."""

from .serving import serve
from .settling import settled
from .suites import generate, memory, packed, small, train

SUITES = {
    suite.__name__: suite for suite in (train, small, packed, settled, generate, memory, serve)
}
