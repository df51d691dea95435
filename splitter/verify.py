"""Checks the result of each pass of ``split``. A violation is a bug, or a model that cannot be split."""

from collections import Counter

from torch import fx

from lamina.core.errors import UnsupportedModelError
from lamina.splitter.capture import Capture
from lamina.splitter.cut import Partition, ancestors, row_layout
from lamina.splitter.rows import depends_on_order, mixing, numbering
from lamina.splitter.split_model import Slice, SplitModel


def verify_capture(captured: Capture) -> None:
    """Check that all inputs of the graph are known by name, that only attentions mix tokens, and that no value is
    computed from row numbers."""
    known = {captured.ids.name, captured.positions.name, *captured.weights, *captured.constants}
    unknown = [n.name for n in captured.graph.nodes if n.op == "placeholder" and n.users and n.name not in known]
    _require(not unknown, f"the traced graph has inputs of unknown origin: {unknown}")
    foreign = [n.name for n in captured.graph.nodes if n.op not in ("placeholder", "call_function", "output")]
    _require(not foreign, f"the traced graph has nodes that are not operators: {foreign}")
    mixed = [f"{node.target}" for node in mixing(captured.graph)]
    _require(not mixed, f"tokens are mixed outside the attentions by {sorted(set(mixed))}: state besides the KV cache")
    numbered = sorted({f"{node.meta['path']} ({node.target})" for node in numbering(captured.graph)})
    _require(not numbered, f"{numbered} compute with the numbers of rows in a step, which are not tokens' positions")
    missing = sorted(set(captured.weights.values()) - set(captured.shapes))
    _require(not missing, f"the traced graph uses weights that the model's state dict lacks: {missing}")


def verify_order(captured: Capture) -> None:
    """Check that a row has the same results in any order of rows, and without other rows."""
    wrong = depends_on_order(captured)
    _require(wrong is None, f"the result {wrong!r} of a token depends on the other tokens of a step, or their order")


def verify_partition(captured: Capture, parts: Partition) -> None:
    """Check that no slice depends on a later one, and that every value used across a cut is sent across it."""
    attentions = captured.attentions
    arrives = {attention: index + 1 for index, attention in enumerate(attentions)}
    for node in captured.graph.nodes:
        if node.op != "call_function" or node in parts.replicable or node in arrives:
            continue
        home = parts.home[node]
        for source in node.all_input_nodes:
            if source.op == "placeholder" or source in parts.replicable:
                continue
            since = arrives.get(source, parts.home.get(source, len(attentions) + 1))
            _require(
                since <= home, f"{node.name} in slice {home} depends on {source.name}, known from slice {since} on"
            )
            unsent = [cut for cut in range(since, home) if source not in parts.contexts[cut]]
            _require(not unsent, f"{node.name} in slice {home} needs {source.name}, which does not cross cuts {unsent}")
    for index, attention in enumerate(attentions):
        late = [n.name for n in ancestors(attention.all_input_nodes) if parts.home.get(n, 0) > index]
        _require(not late, f"attention {index} depends on later slices: {late}")
    for cut, context in enumerate(parts.contexts):
        unsendable = [node.name for node in context if row_layout(node) is None]
        _require(not unsendable, f"cut {cut} would send tensors that do not hold one row per token: {unsendable}")


def verify(model: SplitModel) -> None:
    """Check the slices of a whole model against each other. Raises UnsupportedModelError naming the violation.

    There must be one attention and one cut between slices; the inputs of each graph must be the results of the previous
    one; every weight that is not tied must belong to a single slice.
    """
    count = len(model.attentions)
    expected = model.config.get_text_config().num_hidden_layers
    _require(count == expected, f"found {count} attentions, expected {expected}, one per layer")
    sizes = (len(model.slices), len(model.cuts), len(model.sinks))
    _require(sizes == (count + 1, count, count), f"{count} attentions, but {sizes} slices, cuts and sinks")
    for part in model.slices:
        _verify_interface(model, part)
    owners = Counter(name for part in model.slices for name in set(part.weights))
    owners.update(name for name in model.sinks if name)
    shared = [name for name, slices in owners.items() if slices > 1 and name not in model.ties.values()]
    _require(not shared, f"weights used by several slices without being tied: {shared}")
    lacking = sorted(set(owners) ^ set(model.weights))
    _require(not lacking, f"weights of slices and weights of the model differ: {lacking}")
    constants = {name for part in model.slices for name in part.constants}
    _require(constants <= set(model.constants), f"constants without a value: {constants - set(model.constants)}")


def _verify_interface(model: SplitModel, part: Slice) -> None:
    received = len(model.cuts[part.index - 1].context) if part.index else 0
    inputs = [node.name for node in part.graph.graph.nodes if node.op == "placeholder"]
    takes = len(part.weights) + len(part.constants) + (3 if part.index else 2) + received
    _require(len(inputs) == takes, f"slice {part.index} takes {len(inputs)} inputs but is given {takes}")
    results = part.graph.graph.output_node().args[0]
    assert isinstance(results, tuple)
    gives = 1 if part.last else 3 + len(model.cuts[part.index].context)
    _require(len(results) == gives, f"slice {part.index} returns {len(results)} tensors, expected {gives}")
    _require(all(isinstance(result, fx.Node) for result in results), f"slice {part.index} returns constants")


def _require(holds: bool, fact: str) -> None:
    if not holds:
        raise UnsupportedModelError(f"{fact}; this model cannot be split, please report its config.json")
