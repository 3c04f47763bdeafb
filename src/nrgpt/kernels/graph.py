"""Record once what a function does on a GPU, and replay it: one launch instead of hundreds."""

import gc
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")

WARM_UP = 3
"""Ordinary calls before the recording, in which compilers and libraries set themselves up."""


@dataclass
class Recording:
    inputs: tuple[Any, ...]
    """Where the graph reads its arguments from."""
    calls: int = 0
    graph: Any = None
    outputs: Any = None


class Graphed(Generic[Result]):
    """A function of tensors, recorded as a CUDA graph for each combination of their shapes.

    The function must not wait for the device. What it reads besides its arguments may change in
    place, but must not move in memory. On a CPU the function is simply called. With ``passing``, a
    result is valid only until the next call.
    """

    def __init__(self, function: Callable[..., Result], *, passing: bool = False):
        # A bound method would keep its object alive, which usually holds this one. Memory on the
        # GPU would then be freed only when Python collects such cycles.
        is_method = inspect.ismethod(function)
        self.refer = weakref.WeakMethod(function) if is_method else lambda: function
        self.passing = passing
        self.stream: Any = None
        self.recordings: dict[Any, Recording] = {}

    def function(self, *arguments: Any) -> Result:
        function = self.refer()
        assert function is not None
        return function(*arguments)

    def __call__(self, *arguments: Any) -> Result:
        if not any(isinstance(a, Tensor) and a.is_cuda for a in arguments):
            return self.function(*arguments)
        key = tuple((a.shape, a.dtype) if isinstance(a, Tensor) else a for a in arguments)
        if key not in self.recordings:
            inputs = tuple(a.clone() if isinstance(a, Tensor) else a for a in arguments)
            self.recordings[key] = Recording(inputs)
        recording = self.recordings[key]
        for kept, given in zip(recording.inputs, arguments, strict=True):
            if isinstance(kept, Tensor):
                kept.copy_(given)
        recording.calls += 1
        if recording.calls <= WARM_UP:
            return self.beside(*recording.inputs)
        if recording.graph is None:
            self.record(recording)
        recording.graph.replay()
        return recording.outputs if self.passing else clone(recording.outputs)

    def beside(self, *arguments: Any) -> Result:
        """Call it on a separate stream, as a recording would."""
        here = torch.cuda.current_stream()
        self.stream = self.stream or torch.cuda.Stream()
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            result = self.function(*arguments)
        here.wait_stream(self.stream)
        return result

    def record(self, recording: Recording) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with no_garbage_collected(), torch.cuda.graph(graph):
                recording.outputs = self.function(*recording.inputs)
        except RuntimeError as error:
            raise RuntimeError(
                "this could not be recorded as a CUDA graph (does a term of your own wait for the "
                'device?); train with graph=false, generate with cache="none"'
            ) from error
        recording.graph = graph


@contextmanager
def no_garbage_collected() -> Iterator[None]:
    """Freeing an older graph during a recording would spoil it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def clone(result: Any) -> Any:
    """A copy that the next replay does not overwrite."""
    if isinstance(result, tuple):
        return tuple(clone(part) for part in result)
    return result.clone()
