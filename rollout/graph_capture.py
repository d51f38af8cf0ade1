"""Recording what a function does to fixed memory, and doing it again without the function.

A recording keeps addresses and no numbers: a replay reads and writes the very memory that the recorded
calls did. So whatever changes between replays has to be copied into memory that was there when the
function was recorded, and nothing that it made on the way may be read afterwards.

`CudaCapture` is the real one. `TapeCapture` keeps to the same rules on any device and refuses what a
CUDA graph would do wrong in silence, at a cost: it is what the tests run.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Runs a function of no arguments at least once, and returns what replays it."""

WARM_UP_RUNS = 3
"""Before a recording: libraries choose kernels and take workspaces at first use."""


class CudaCapture:
    """CUDA graphs, one pool of memory for all of them: what one replay leaves there, the next one of
    any graph overwrites."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UP_RUNS):
                    run()
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(
                graph,
                pool=self._pool,
                stream=self._stream,
                capture_error_mode="thread_local",  # other threads of an actor may use the device
            ):
                run()
        return graph.replay


class TapeCapture:
    """A list of the tensor operations that ran, run again on the same memory.

    What the function did not make is held weakly, as a graph holds addresses: a replay raises when it
    is gone. What the function made is filled with NaN behind it, as another graph of the pool would
    overwrite it. An operation that waits for the host or brings in its numbers is refused.
    """

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        tape = _Tape()
        with tape:
            run()
        return tape.finished()


HOST_OPS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.item.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.lift_fresh.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.equal.default,
}
"""Operations that read a number of a tensor, or make a tensor of the host's numbers. Indexing by a
mask, whose result has as many elements as it names, is one more."""


@dataclass(frozen=True, slots=True)
class _Result:
    """A tensor by its place among all that the operations returned."""

    index: int


@dataclass(frozen=True, slots=True)
class _Call:
    function: Any
    arguments: Any
    """Positional and named; tensors as _Result, or as weak references."""


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._calls: list[_Call] = []
        self._results: list[torch.Tensor] = []
        self._index_of: dict[int, int] = {}
        """Of a result, by its id."""
        self._made: dict[int, torch.UntypedStorage] = {}
        """New memory, by its address."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        arguments = (args, kwargs or {})
        by_mask = function is torch.ops.aten.index.Tensor and any(
            tensor.dtype == torch.bool for tensor in _tensors(args[1])
        )
        assert function not in HOST_OPS and not by_mask, (
            f"{function} within a recording: it needs the host"
        )
        self._calls.append(_Call(function, tree_map(self._named, arguments)))
        result = function(*args, **(kwargs or {}))
        known = {_address(tensor) for tensor in _tensors(arguments)}
        for tensor in _tensors(result):
            self._index_of[id(tensor)] = len(self._results)
            self._results.append(tensor)
            if _address(tensor) not in known:
                self._made[_address(tensor)] = tensor.untyped_storage()
        return result

    def _named(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        index = self._index_of.get(id(value))
        return weakref.ref(value) if index is None else _Result(index)

    def finished(self) -> Callable[[], None]:
        """What replays the calls; nothing that they made is held or left as it was."""
        for storage in self._made.values():
            storage.fill_(0xFF)  # type: ignore[attr-defined]  # NaN in floats, -1 in whole numbers
        calls = self._calls
        self._results, self._index_of, self._made = [], {}, {}

        def replay() -> None:
            results: list[torch.Tensor] = []
            for call in calls:
                args, kwargs = tree_map(partial(_value, results), call.arguments)
                results += _tensors(call.function(*args, **kwargs))

        return replay


def _value(results: Sequence[torch.Tensor], name: Any) -> Any:
    if isinstance(name, _Result):
        return results[name.index]
    if not isinstance(name, weakref.ref):
        return name
    tensor = name()
    assert tensor is not None, "a recording reads memory that is gone"
    return tensor


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
