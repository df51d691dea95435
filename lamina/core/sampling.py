"""What a request asks for: sampling parameters, structured outputs, and their limits."""

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

MAX_STOP_STRINGS = 32
MAX_STOP_LENGTH = 128  # characters
MAX_STOP_TOKEN_IDS = 256
MAX_SALT_LENGTH = 256  # characters
MAX_BAD_WORDS = 256

OPTIONAL_NUMBERS = ("seed", "max_tokens", "logprobs", "best_of", "prompt_logprobs", "truncate_prompt_tokens")
"""The numeric fields of ``SamplingParams`` that may be None."""

SAMPLING_RANGES: Mapping[str, tuple[float, float]] = {
    "n": (1, 128),
    "best_of": (1, 128),
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),  # beyond, logits could overflow
    "seed": (-(2**63), 2**63 - 1),
    "max_tokens": (1, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
    "logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
    "truncate_prompt_tokens": (-1, 2**31 - 1),
    "length_penalty": (-10.0, 10.0),
    "priority": (-(2**31), 2**31 - 1),
}
"""Smallest and largest value of each numeric field of ``SamplingParams``; two ints mean that it is an integer."""

UNUSED_BY_BEAM_SEARCH: Mapping[str, tuple[Any, ...]] = {
    "temperature": (1.0, 0.0),
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "stop": ([],),
    "logprobs": (None,),
    "prompt_logprobs": (None,),
    "best_of": (None,),
    "bad_words": ([],),
    "bad_token_ids": ([],),
    "structured_outputs": (None,),
    "forced_token_ids": ([],),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
}
"""The values without effect of each field of ``SamplingParams`` that beam search does not use."""


def _shown(value: Any) -> str:
    """Return ``value`` for an error message, shortened."""
    try:
        text = reprlib.repr(value)
    except ValueError:  # an integer with more digits than Python converts
        text = "an integer of very many digits"
    return text if len(text) <= 100 else f"{text[:100]}..."


def is_unicode(text: str) -> bool:
    """Return whether ``text`` can be encoded."""
    return not any("\ud800" <= character <= "\udfff" for character in text)  # a lone surrogate cannot be encoded


MAX_CHOICES = 1024
MAX_BIASED_TOKENS = 1024


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """Constraint that an answer must match. Exactly one argument must be given.

    Args:
        json: JSON schema, as text, as an object or as a pydantic model.
        regex: Regular expression, in the syntax of Rust's regex crate.
        choice: Texts, of which the answer is one.
        grammar: Grammar in Lark's syntax, or in llama.cpp's (GBNF).
        json_object: True: the answer is any JSON object.

    Raises:
        ValueError: No argument or several are given, or one has the wrong type. Whether the constraint compiles is
            checked when a request is submitted.
    """

    json: Any = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("json", "regex", "choice", "grammar") if getattr(self, name) is not None]
        given += ["json_object"] if self.json_object else []
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ValueError(
                f"structured_outputs has {found} of json, regex, choice, grammar and json_object; give one"
            )
        schema = {"type": "object"} if self.json_object else self.json
        if hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"structured_outputs.json is not JSON: {error}") from None
        if schema is not None:
            try:
                object.__setattr__(self, "json", json.dumps(schema))
            except (TypeError, ValueError) as error:
                raise ValueError(f"structured_outputs.json is no JSON schema: {error}") from None
            object.__setattr__(self, "json_object", None)
        for name in ("regex", "grammar"):
            if not isinstance(value := getattr(self, name), str | None) or value == "":
                raise ValueError(f"structured_outputs.{name} is {_shown(value)}; give a text")
        if (choice := self.choice) is not None:
            if isinstance(choice, str) or not isinstance(choice, Sequence) or not 1 <= len(choice) <= MAX_CHOICES:
                raise ValueError(f"structured_outputs.choice is {_shown(choice)}; give 1 to {MAX_CHOICES} texts")
            if not all(isinstance(text, str) and text for text in choice):
                raise ValueError(f"structured_outputs.choice is {_shown(choice)}; give texts that are not empty")
            object.__setattr__(self, "choice", tuple(choice))


def _plain(value: Any) -> Any:
    """Return ``value`` with Python's numbers for those of NumPy and PyTorch, also in lists."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value.tolist() if hasattr(value, "tolist") else value


def require_in_range(name: str, value: Any) -> None:
    """Raise ValueError unless ``value`` is allowed for the numeric field ``name`` of ``SamplingParams``."""
    _require(name, value, *SAMPLING_RANGES[name])
    if name == "truncate_prompt_tokens" and value == 0:
        raise ValueError("truncate_prompt_tokens is 0; give at least 1, or -1 for what fits in the context")


def _require(name: str, value: Any, low: float, high: float) -> None:
    integer = isinstance(low, int)
    kind = "an integer" if integer else "a number"
    right_type = isinstance(value, int) if integer else isinstance(value, int | float)
    # NaN fails the range check.
    if isinstance(value, bool) or not right_type or not low <= value <= high:
        raise ValueError(f"{name} is {_shown(value)}; give {kind} from {low} to {high}")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are sampled; names and defaults are those of vLLM's ``SamplingParams``.

    Args:
        n: completions per prompt.
        best_of: draw this many completions, and return the ``n`` whose tokens have the highest log-probability on
            average, the best first. All tokens arrive at the end. None: draw ``n``.
        temperature: 0 is greedy.
        top_p: keep the most likely tokens whose probabilities add up to this.
        top_k: keep this many of the most likely tokens; 0 or -1: all.
        min_p: keep the tokens with at least this part of the largest probability.
        presence_penalty: in [-2, 2], once for each generated token.
        frequency_penalty: in [-2, 2], for each occurrence of a generated token.
        repetition_penalty: in [0.01, 100], over prompt and generated tokens; 1: no penalty.
        seed: makes a request reproducible whatever else is running, up to the rounding of the model's arithmetic: a
            token may differ where the two best are as close as the rounding of float32, bfloat16, float16 or KV types.
            None or -1: random.
        stop: strings that end a completion, at most 32 of at most 128 characters.
        include_stop_str_in_output: keep the stop string in the text.
        stop_token_ids: tokens that end a completion, at most 256.
        skip_special_tokens: leave special tokens out of the text. A stop string that contains the text of one ends a
            completion either way.
        ignore_eos: do not stop at the model's end of sequence.
        max_tokens: at most this many tokens; None: as many as the model's context and a memory worker allow.
        min_tokens: no end of sequence or stop token before this many tokens.
        logprobs: number of most likely tokens to report per position besides the sampled one; None: no logprobs.
        prompt_logprobs: number of most likely tokens to report per position of the prompt besides the prompt's own
            token; None: none. The prompt then runs one token per step, as slowly as decoding.
        truncate_prompt_tokens: keep this many of the prompt's last tokens; -1: as many as leave room for
            ``max_tokens`` in the context, or for one token without a limit.
        priority: a request with a smaller number goes first where the server's ``policy`` is priority. Under any
            policy, its prefix stays longer in the cache: a step is worth 1,000 requests, and 10 steps at most count.
        cache_salt: text of at most 256 characters. Only requests with equal salts share cached prefixes, so that nobody
            else can find out from response times what these prompts begin with.
        use_beam_search: search with ``n`` beams, at least 2, and return the ``n`` best completions, best first, like
            Hugging Face's ``generate(num_beams=n)``. Nothing is drawn at random, so parameters of sampling,
            penalties, stop strings and logprobs must be left out. All tokens arrive at the end.
        length_penalty: in [-10, 10]: a beam's score is the sum of its log-probabilities over its length to this power.
        early_stopping: when a beam search ends. True: once ``n`` beams have ended. False: once no open beam is likely
            to become better than the ``n`` best that have ended. "never": once no open beam can.
        forced_token_ids: tokens that a completion begins with, whatever their probabilities. ``logprobs`` reports them.
        logit_bias: by token id, what is added to its logit, in [-100, 100]; at most 1,024 tokens.
        allowed_token_ids: the only tokens that may be drawn, at most 1,024; None: all.
        bad_words: texts that are not generated, at most 256 of at most 128 characters: the last token of a text is not
            drawn after the text's other tokens. Each text is tokenized as a word and as a part of a word.
        bad_token_ids: sequences of token ids that are not generated.
        structured_outputs: constraint that an answer must match. The answer ends where the constraint allows no more
            tokens, or at ``max_tokens``.

    Raises:
        ValueError: a value has the wrong type, is NaN or out of range; the message gives the range.

    >>> SamplingParams(temperature=0.7, top_p=0.9, max_tokens=64, stop=["\\n\\n"]).max_tokens
    64
    >>> SamplingParams(top_p=1.5)
    Traceback (most recent call last):
        ...
    ValueError: top_p is 1.5; give a number from 0.0 to 1.0
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    priority: int = 0
    cache_salt: str = ""
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = field(default_factory=list)
    bad_token_ids: list[list[int]] = field(default_factory=list)
    structured_outputs: StructuredOutputs | None = None
    forced_token_ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._make_plain()
        for name in SAMPLING_RANGES:
            if (value := getattr(self, name)) is not None or name not in OPTIONAL_NUMBERS:
                require_in_range(name, value)
        if self.seed == -1:  # as of vLLM and llama.cpp
            object.__setattr__(self, "seed", None)
        if self.top_p == 0.0:
            raise ValueError("top_p is 0; give a value in (0, 1] (1 keeps every token)")
        if self.max_tokens is not None:
            _require("min_tokens", self.min_tokens, 0, self.max_tokens)
        salt = self.cache_salt
        if not isinstance(salt, str) or len(salt) > MAX_SALT_LENGTH or not is_unicode(salt):
            raise ValueError(
                f"cache_salt is {_shown(salt)}; give valid Unicode of at most {MAX_SALT_LENGTH} characters"
            )
        self._require_few("stop", self.stop, MAX_STOP_STRINGS, "strings")
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_LENGTH or not is_unicode(text):
                length = f" of {len(text)} characters" if isinstance(text, str) else ""
                raise ValueError(
                    f"stop has {_shown(text)}{length}; every stop string must be valid Unicode of 1 to "
                    f"{MAX_STOP_LENGTH} characters"
                )
        self._require_few("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS, "token ids")
        for token in self.stop_token_ids:
            _require("stop_token_ids", token, 0, 2**31 - 1)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(f'early_stopping is {_shown(self.early_stopping)}; give true, false or "never"')
        for name in ("use_beam_search", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"{name} is {_shown(value)}; give true or false")
        _require("best_of", self.best_of or self.n, self.n, SAMPLING_RANGES["best_of"][1])
        self._check_bias()
        self._check_bad_words()
        self._check_forced_tokens()
        self._check_structured_outputs()
        self._check_beam_search()

    def _make_plain(self) -> None:
        """Replace forms of values that are also accepted: None for lists, as in vLLM, and NumPy's numbers."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", [] if stop is None else stop)
        object.__setattr__(self, "bad_words", [] if self.bad_words is None else self.bad_words)
        object.__setattr__(self, "stop_token_ids", [] if self.stop_token_ids is None else self.stop_token_ids)
        for name in (*SAMPLING_RANGES, "stop_token_ids", "allowed_token_ids"):
            object.__setattr__(self, name, _plain(getattr(self, name)))

    def _check_bias(self) -> None:
        if (allowed := self.allowed_token_ids) is not None:
            self._require_few("allowed_token_ids", allowed, MAX_BIASED_TOKENS, "token ids")
            if not allowed:
                raise ValueError("allowed_token_ids is empty; give at least one token, or leave it out")
            for token in allowed:
                _require("allowed_token_ids", token, 0, 2**31 - 1)
        if (bias := self.logit_bias) is None:
            return
        if not isinstance(bias, Mapping) or len(bias) > MAX_BIASED_TOKENS:
            raise ValueError(f"logit_bias is {_shown(bias)}; give an object of at most {MAX_BIASED_TOKENS} token ids")
        found = {}
        for key, value in zip(_plain([*bias]), _plain([*bias.values()]), strict=True):
            # JSON's keys are texts.
            token = int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 12 else key
            _require("logit_bias", token, 0, 2**31 - 1)
            _require("logit_bias", value, -100.0, 100.0)
            found[token] = float(value)
        object.__setattr__(self, "logit_bias", found)

    def _check_bad_words(self) -> None:
        self._require_few("bad_words", self.bad_words, MAX_BAD_WORDS, "texts")
        for text in self.bad_words:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_LENGTH or not is_unicode(text):
                raise ValueError(
                    f"bad_words has {_shown(text)}; give valid Unicode of 1 to {MAX_STOP_LENGTH} characters"
                )
        for tokens in self.bad_token_ids:
            if not tokens:
                raise ValueError("bad_token_ids has an empty sequence; give at least one token in each")
            for token in tokens:
                _require("bad_token_ids", token, 0, 2**31 - 1)

    def _check_forced_tokens(self) -> None:
        for token in self.forced_token_ids:
            _require("forced_token_ids", token, 0, 2**31 - 1)
        count = len(self.forced_token_ids)
        if self.max_tokens is not None and count > self.max_tokens:
            raise ValueError(f"forced_token_ids has {count} tokens; max_tokens is {self.max_tokens}")

    def _check_structured_outputs(self) -> None:
        given = self.structured_outputs
        if given is None:
            return
        if isinstance(given, Mapping):
            try:
                object.__setattr__(self, "structured_outputs", StructuredOutputs(**given))
            except TypeError:
                names = ", ".join(StructuredOutputs.__dataclass_fields__)
                raise ValueError(f"structured_outputs has the fields {', '.join(given)}; give one of {names}") from None
        elif not isinstance(given, StructuredOutputs):
            raise ValueError(f"structured_outputs is {_shown(given)}; give an object such as {{'regex': '[0-9]+'}}")
        if self.prompt_logprobs is not None:
            raise ValueError(
                f"prompt_logprobs is {self.prompt_logprobs}; leave it out beside structured_outputs, which the prompt "
                "does not match"
            )
        if self.forced_token_ids:
            raise ValueError("forced_token_ids has tokens; leave them out beside structured_outputs")
        if self.min_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}; leave it out beside structured_outputs, which say the end"
            )

    def _check_beam_search(self) -> None:
        """Raise ValueError for parameters without effect: of sampling with beam search, of beam search without it."""
        if not self.use_beam_search:
            for name, default in (("length_penalty", 1.0), ("early_stopping", False)):
                if (value := getattr(self, name)) != default:
                    raise ValueError(f"{name} is {_shown(value)}, but use_beam_search is false; set it or leave it out")
            return
        if self.n < 2:
            raise ValueError(f"n is {self.n}, the number of beams; give at least 2, or leave out use_beam_search")
        for name, neutral in UNUSED_BY_BEAM_SEARCH.items():
            if (value := getattr(self, name)) not in neutral:
                raise ValueError(f"{name} is {_shown(value)}; beam search does not use it, leave it out")

    @property
    def penalizes(self) -> bool:
        """Whether earlier tokens, of prompt or completion, change the probabilities of the next token."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def reads_history(self) -> bool:
        """Whether the tokens that may be drawn depend on the tokens generated before."""
        return self.penalizes or self.structured_outputs is not None or bool(self.bad_token_ids)

    @staticmethod
    def _require_few(name: str, values: Any, most: int, what: str) -> None:
        """Raise ValueError for more than ``most`` values, before their contents are checked."""
        if not isinstance(values, list | tuple):
            raise ValueError(f"{name} is {_shown(values)}; give a list of at most {most} {what}")
        if len(values) > most:
            raise ValueError(f"{name} has {len(values)} {what}; give at most {most}")

    @property
    def greedy(self) -> bool:
        """Whether no token is drawn at random."""
        return self.temperature == 0.0 or self.use_beam_search
