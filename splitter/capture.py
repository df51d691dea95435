"""Captures a model as one flat graph, from its configuration and without allocating weights.

The model is built and run under a fake tensor mode on the CPU (not on the meta device, where mixture-of-expert layers
take another branch). Only as many layers are captured as are needed to see every distinct slice.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._export.utils import _compiling_state_context
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from transformers.configuration_utils import PretrainedConfig
from transformers.initialization import no_init_weights
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from lamina.core.errors import UnsupportedModelError
from lamina.core.types import DType
from lamina.splitter import adapters
from lamina.splitter.markers import ATTENTION
from lamina.splitter.operators import EXAMPLE_ROWS, LayerRecorder, representatives, shortest_prefix, write_operators
from lamina.splitter.split_model import Weight


@dataclass(frozen=True)
class Capture:
    """A model as one graph of functional operators over rows, one per token, without a batch dimension.

    Attributes:
        graph: placeholders for weights, constants, ids [T] and positions [T]; one output, logits [T, vocab].
        weights: placeholder name -> checkpoint name.
        constants: placeholder name -> buffer name.
        ids: placeholder of the token ids.
        positions: placeholder of the positions.
        representatives: for each slice of the whole model, the number of the equal slice of ``graph``.
        shapes: shape and element type of every weight of the whole model except tied ones.
        ties: name of a tied weight -> name of the weight that it shares.
        buffer: returns the value of a constant of the whole model, by name.
    """

    graph: fx.Graph
    weights: Mapping[str, str]
    constants: Mapping[str, str]
    ids: fx.Node
    positions: fx.Node
    representatives: tuple[int, ...]
    shapes: Mapping[str, Weight]
    ties: Mapping[str, str]
    buffer: Callable[[str], Tensor]

    @property
    def attentions(self) -> list[fx.Node]:
        """Attention operators of ``graph``, first to last."""
        return [node for node in self.graph.nodes if node.target is ATTENTION]


class _Flat(nn.Module):
    """A causal language model over one sequence: ids [T], positions [T] -> logits [T, vocab]."""

    def __init__(self, model: PreTrainedModel, takes_positions: bool) -> None:
        super().__init__()
        self.model = model
        self.takes_positions = takes_positions

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        inputs: dict[str, Any] = {"position_ids": positions[None]} if self.takes_positions else {}
        logits: Tensor = self.model(input_ids=ids[None], use_cache=False, **inputs).logits
        return logits[0]


def capture(config: PretrainedConfig, dtype: DType) -> Capture:
    """Trace the model that ``config`` (not mutated) describes.

    Raises:
        UnsupportedModelError: it is not a decoder, cannot be traced, or has state besides the KV cache.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    model = _build(config, dtype, mode)
    shapes = {name: Weight(tuple(t.shape), t.dtype) for name, t in model.state_dict().items()}
    ties: dict[str, str] = dict(model.all_tied_weights_keys)
    flat = _Flat(model, takes_positions="position_ids" in inspect.signature(model.forward).parameters)
    if not flat.takes_positions and not adapters.knows_positions(config.model_type):
        raise UnsupportedModelError(
            f"{type(model).__name__} takes no position_ids, so tokens of several requests cannot share a batch"
        )
    with torch.no_grad():
        recorder = _record(flat, mode, config)
        records = recorder.records()
        prefix = shortest_prefix(records)
        modules = dict(model.named_modules())
        layers = _layers(model, len(records) - 1)
        del layers[prefix:]
        with _unsupported_on_error(config):
            written = write_operators(flat, mode, recorder.writes_in_place)
    names = {name: target.removeprefix("model.") for name, target in written.tensors.items()}
    weights = {name: ties.get(target, target) for name, target in names.items() if target in shapes}
    constants = {name: target for name, target in names.items() if target not in shapes}
    return Capture(
        graph=written.graph,
        weights=weights,
        constants=constants | {name: name for name in written.literals},
        ids=written.ids,
        positions=written.positions,
        representatives=representatives(records, prefix),
        shapes={name: weight for name, weight in shapes.items() if name not in ties},
        ties=ties,
        buffer=lambda name: written.literals[name] if name in written.literals else _constant(model, modules, name),
    )


def _build(config: PretrainedConfig, dtype: DType, mode: FakeTensorMode) -> Any:
    config = copy.deepcopy(config)
    if config.is_encoder_decoder or config.get_text_config() is not config:
        raise UnsupportedModelError(
            f"model type {config.model_type!r} is more than a text decoder; give the configuration of its text model"
        )
    if not getattr(config, "is_causal", True):
        raise UnsupportedModelError(
            f"model type {config.model_type!r}: its configuration says that is_causal is false, so tokens attend to "
            "later ones: only decoder attention can be served from a KV cache; give a model that generates text"
        )
    try:
        with mode, no_init_weights():  # some families draw values in ways that fake tensors do not have
            model = AutoModelForCausalLM.from_config(
                config,
                dtype=getattr(torch, dtype.value),
                attn_implementation=adapters.build_implementation(config.model_type),
            )
            model.tie_weights()
            adapters.adapt(model, config.model_type)
            adapters.keep_in_float32(model, dtype)
    except Exception as error:  # model code of transformers may raise any type
        raise UnsupportedModelError(
            f"transformers cannot build {config.model_type!r} as a decoder: {_first_line(error)}"
        ) from error
    return model.eval()


def _record(flat: _Flat, mode: FakeTensorMode, config: PretrainedConfig) -> LayerRecorder:
    """Run the whole model once on fake tensors, and check that each layer has exactly one attention."""
    recorder = LayerRecorder(flat.model)
    # Models use other operators while they are compiled; the record must have the operators that are captured later.
    with _unsupported_on_error(config), _compiling_state_context(), mode, recorder:
        flat(torch.zeros(EXAMPLE_ROWS, dtype=torch.long), torch.arange(EXAMPLE_ROWS))
    found, layers = recorder.attentions, config.num_hidden_layers
    if found != layers:
        why = (
            "Layers with another kind of memory (linear attention, state space, shared KV) cannot be split; give a "
            "model without them"
            if found
            else f"A family with attention code of its own needs an adapter, as {', '.join(adapters.FAMILIES)} have; "
            "give a model of another family, or add an adapter (splitter/adapters.py)"
        )
        raise UnsupportedModelError(
            f"model type {config.model_type!r}: found {found} attentions, expected {layers}, one in every layer and "
            f"called through transformers' attention interface. {why}"
        )
    if flat.model._is_stateful:
        raise UnsupportedModelError(
            f"model type {config.model_type!r}: found {found} attentions in {layers} layers, but also a recurrent "
            "state; give a model whose only state is the KV cache"
        )
    return recorder


@contextmanager
def _unsupported_on_error(config: PretrainedConfig) -> Iterator[None]:
    """Convert any exception of the model's code to UnsupportedModelError."""
    try:
        yield
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise _untraceable(config, error) from error


def _untraceable(config: PretrainedConfig, error: Exception) -> UnsupportedModelError:
    rope = _rope_by_length(config)
    if rope:
        return UnsupportedModelError(
            f"model type {config.model_type!r}: its rotary embedding, of type {rope!r}, takes its frequencies from the "
            "longest sequence of a batch, so tokens of several requests cannot share a batch; give a model of another "
            "rope_type"
        )
    if selected := getattr(config, "index_topk", None):
        return UnsupportedModelError(
            f"model type {config.model_type!r}: its attentions see only the {selected} tokens that an indexer selects "
            "(index_topk); Lamina's attentions see all tokens, or those of a window or chunk. Give a model without it"
        )
    return UnsupportedModelError(
        f"model type {config.model_type!r} cannot be traced with a variable number of tokens: {type(error).__name__}: "
        f"{_first_line(error)}"
    )


def _first_line(error: Exception) -> str:
    """Return what an error says, without the advice to developers that PyTorch adds in further lines."""
    return next(iter(str(error).strip().splitlines()), "no reason given")


def _rope_by_length(config: PretrainedConfig) -> str | None:
    """Return the first rope_type whose frequencies depend on the sequence length; None if no rope_type does."""
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]  # one for all layers, or one per type
    return next((kind["rope_type"] for kind in kinds if kind.get("rope_type") in ("dynamic", "longrope")), None)


def _layers(model: nn.Module, count: int) -> nn.ModuleList:
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UnsupportedModelError(f"{type(model).__name__} has no ModuleList of its {count} layers")


def _constant(model: Any, modules: Mapping[str, nn.Module], name: str) -> Tensor:
    """Return the value of a buffer that checkpoints do not hold, initialised as ``from_pretrained`` does."""
    path, _, attribute = name.rpartition(".")
    module = copy.copy(modules[path])
    module._buffers = {
        key: None if buffer is None else torch.zeros(buffer.shape, dtype=buffer.dtype)
        for key, buffer in module._buffers.items()
    }
    _innermost_model(model, path)._init_weights(module)
    return module.get_buffer(attribute)


def _innermost_model(model: Any, path: str) -> Any:
    """Return the model that initialises the module at ``path``: ``model``, or one inside of it, as in transformers."""
    found = model
    for name in path.split("."):
        model = getattr(model, name)
        found = model if isinstance(model, PreTrainedModel) else found
    return found
