"""Finds equal layers by recording the operators a model runs between one attention and the next."""

import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from lamina.splitter.attention import OPERATOR

_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


def shift(name: str, layers: int) -> str:
    """Return the name of the same weight ``layers`` layers later; names without a layer do not change."""
    return _LAYER.sub(lambda match: str(int(match.group()) + layers), name, count=1)


def relative(name: str, layer: int) -> str:
    """Return the name with its layer relative to ``layer``: equal for corresponding weights of different layers."""
    return _LAYER.sub(lambda match: f"{int(match.group()) - layer:+d}", name, count=1)


Record = Hashable
_Name = Callable[[int], Hashable]  # index of the stretch that uses a tensor -> its name there


def _weight(name: str) -> _Name:
    return lambda user: ("weight", relative(name, user))


def _global(name: Hashable) -> _Name:
    return lambda user: ("global", name)


def _value(stretch: int, place: Hashable) -> _Name:
    return lambda user: ("value", stretch - user, place)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators that run inside it. Enter it inside the fake tensor mode of ``model``.

    ``writes_in_place`` is True once an operator has written a tensor in place.

    Tensors that depend on the model's inputs alone (positions, cos, sin) have the same name everywhere and are not
    recorded by themselves: a model may compute them once or in every layer.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.writes_in_place = False
        self._stretches: list[list[Hashable]] = [[]]
        self._names: dict[int, _Name] = {}
        self._global: dict[Hashable, int] = {}  # values that depend on inputs alone, numbered by how they are computed
        self._alive: list[Tensor] = []  # so that no id() is reused
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            self._assign(weight, _weight(name))
        for name, buffer in model.named_non_persistent_buffers():
            if relative(name, 0) == name:  # belongs to no layer: inv_freq of the whole model
                self._assign(buffer, _global(name))

    @property
    def attentions(self) -> int:
        """Attention operators seen."""
        return len(self._stretches) - 1

    def records(self) -> tuple[Record, ...]:
        """One record per stretch, ``attentions + 1`` of them; an attention belongs to the stretch it ends."""
        return tuple(tuple(stretch) for stretch in self._stretches)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.writes_in_place |= func._schema.is_mutable
        out = func(*args, **kwargs)
        entry = (str(func), self._describe((args, kwargs)))
        outputs = [
            tensor for tensor in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(tensor, Tensor)
        ]
        if _depends_on_inputs_alone(entry):
            for index, tensor in enumerate(outputs):
                number = self._global.setdefault((entry, index), len(self._global))
                self._assign(tensor, _global(number))
            return out
        stretch = len(self._stretches) - 1
        place = len(self._stretches[-1])
        self._stretches[-1].append(entry)
        for index, tensor in enumerate(outputs):
            self._assign(tensor, _value(stretch, (place, index)))
        if func is OPERATOR:
            self._stretches.append([])
        return out

    def _assign(self, tensor: Tensor, name: _Name) -> None:
        self._alive.append(tensor)
        self._names[id(tensor)] = name

    def _describe(self, value: Any) -> Hashable:
        if isinstance(value, Tensor):
            name = self._names.get(id(value))
            return name(len(self._stretches) - 1) if name else ("global", *_unnamed(value))
        if isinstance(value, (list, tuple)):
            return tuple(self._describe(item) for item in value)
        if isinstance(value, dict):
            return tuple((key, self._describe(item)) for key, item in value.items())
        return repr(value)


def _unnamed(tensor: Tensor) -> tuple[Hashable, ...]:
    """Describe a tensor that the model's code created: with its values, unless it is a fake tensor."""
    if isinstance(tensor, FakeTensor):
        return tuple(tensor.shape), str(tensor.dtype)
    with unset_fake_temporarily():
        return tuple(tensor.shape), str(tensor.dtype), repr(tensor.tolist())


def _depends_on_inputs_alone(entry: Hashable) -> bool:
    """True if an operator's description contains no weight and no recorded value."""
    if not isinstance(entry, tuple):
        return True
    if entry and entry[0] in ("weight", "value"):
        return False
    return all(_depends_on_inputs_alone(item) for item in entry)


def shortest_prefix(records: Sequence[Record]) -> int:
    """Return how many layers must be captured so that every slice of the whole model occurs among them.

    A slice depends on its own stretch and the two neighbouring ones, because the cut moves nodes across attentions.
    The shortened model keeps its head: the last record follows its last layer.
    """
    layers = len(records) - 1
    wanted = set(_triples(records))
    for count in range(1, layers):
        if wanted <= set(_triples([*records[:count], records[-1]])):
            return count
    return layers


def representatives(records: Sequence[Record], prefix: int) -> tuple[int, ...]:
    """Return, for every slice of the whole model, the equal slice of the model cut down to ``prefix`` layers."""
    places = {triple: index for index, triple in reversed(list(enumerate(_triples([*records[:prefix], records[-1]]))))}
    return tuple(places[triple] for triple in _triples(records))


def _triples(records: Sequence[Record]) -> list[tuple[Record, Record, Record]]:
    padded = [None, *records, None]
    return [(padded[i - 1], padded[i], padded[i + 1]) for i in range(1, len(padded) - 1)]
