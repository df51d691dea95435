"""Covering sets: combinations of values that together contain every pair, or every triple, of values that can occur."""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Case = dict[str, Any]
"""One value of each dimension."""
Part = tuple[tuple[str, Any], ...]
"""Values of some dimensions, in the order of the dimensions."""

CANDIDATES = 8  # cases among which the one with most new parts is taken
ATTEMPTS = 40  # random cases with a part, none of which is valid if the part is to count as impossible


def parts(case: Mapping[str, Any], strength: int, names: Sequence[str]) -> Iterator[Part]:
    """Yield the pairs (``strength`` 2) or triples (3) of the values that a case has in some dimensions."""
    return itertools.combinations([(name, case[name]) for name in names], strength)


def covering(
    values: Mapping[str, Sequence[Any]],
    is_valid: Callable[[Case], bool],
    strength: int,
    names: Sequence[str] | None = None,
    begun: Sequence[Case] = (),
    seed: int = 0,
) -> list[Case]:
    """Return valid cases that contain every part of ``strength`` values that any valid case contains.

    Greedy: each case is built around a part that is missing, value by value, so that it has many others too (Cohen et
    al., The AETG System, 1997). The first value of each dimension must exclude nothing: a value is chosen only if the
    case is valid with the first values of the dimensions that are still open.

    Args:
        values: Values of each dimension.
        is_valid: Whether a case may occur.
        strength: Number of values in a part.
        names: Dimensions of which parts consist, in the order of ``values``; None: all.
        begun: Cases that the result has in any case, at its beginning.
        seed: Seed of random choices.
    """
    chance, chosen, names = random.Random(seed), list(begun), names or [*values]
    known = dict[Part, bool]()
    first = {name: each[0] for name, each in values.items()}

    def fits(some: Mapping[str, Any]) -> bool:
        case = {**first, **some}
        key = tuple(case.items())
        if key not in known:
            known[key] = is_valid(case)
        return known[key]

    left = dict[Part, None]()
    for some in itertools.combinations(names, strength):
        left |= dict.fromkeys(itertools.product(*([(name, value) for value in values[name]] for name in some)))
    for case in chosen:
        for part in parts(case, strength, names):
            left.pop(part, None)
    while left:
        part = next(iter(left))
        built = [_built(part, values, fits, left, chance) for _ in range(CANDIDATES)]
        made = [one for one in built if one is not None]
        made = made or [one for one in _drawn(part, values, chance) if fits(one)][:1]
        if not made:
            del left[part]
            continue
        best = max(made, key=lambda case: sum(each in left for each in parts(case, strength, names)))
        chosen.append(best)
        for each in parts(best, strength, names):
            left.pop(each, None)
    return chosen


def _built(
    part: Part,
    values: Mapping[str, Sequence[Any]],
    fits: Callable[[Mapping[str, Any]], bool],
    left: Mapping[Part, None],
    chance: random.Random,
) -> Case | None:
    """Return a case with ``part`` and many parts of ``left``; None if the part is not valid beside first values."""
    case = dict(part)
    if not fits(case):
        return None
    order = {name: place for place, name in enumerate(values)}

    def gain(name: str, value: Any) -> int:
        return sum(
            tuple(sorted((*others, (name, value)), key=lambda one: order[one[0]])) in left
            for others in itertools.combinations(case.items(), len(part) - 1)
        )

    for name in chance.sample([name for name in values if name not in case], len(values) - len(case)):
        choices = chance.sample(list(values[name]), len(values[name]))
        choices.sort(key=lambda value: -gain(name, value))
        case[name] = next((value for value in choices if fits({**case, name: value})), values[name][0])
    made = {name: case[name] for name in values}
    return made if fits(made) else None


def _drawn(part: Part, values: Mapping[str, Sequence[Any]], chance: random.Random) -> Iterator[Case]:
    for _ in range(ATTEMPTS):
        yield {name: chance.choice(each) for name, each in values.items()} | dict(part)
