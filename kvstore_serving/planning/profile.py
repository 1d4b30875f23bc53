"""The profile of an engine: how long prefills and decoding steps take, and how many tokens its memory holds.

A profile is a JSON file. `kvstore plan profile` measures an engine and writes its profile. The profiles in
`kvstore_serving/planning/profiles` have published figures and name their sources. Times are linear in the work of an
engine, as in DistServe:

* a prefill of prompts of L tokens each: a + b sum(L) + c sum(L^2)
* a decoding step: a + b sum(context) + c requests
* a transfer to or from the store: a + b bytes

Each fit lists its residuals: the measured times and the fitted times. The times are for one degree of tensor
parallelism. With `pp` stages, a stage takes 1/`pp` of a time plus `stage_s`. While another engine of the same node
works, times are multiplied by the profile's `contention`.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec

from kvstore_serving.files import replace_file

# A prefill saturates the GPU if its fixed cost is at most this share of its time (see `saturating_tokens`).
FIXED_SHARE: Final = 0.2

_Positive = Annotated[float, msgspec.Meta(gt=0)]
_NotNegative = Annotated[float, msgspec.Meta(ge=0)]
_AtLeastOne = Annotated[float, msgspec.Meta(ge=1)]
_Count = Annotated[int, msgspec.Meta(ge=1)]


class ProfileError(ValueError):
    """The profile cannot be read; the message says what is wrong."""


class Residual(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The measured and the fitted time of `requests` requests at once, with `tokens` tokens each. `error`: the relative
    error of the fitted time, which is positive if that time is too long."""

    requests: int
    tokens: float
    seconds: float
    fitted_s: float
    error: float


class TransferResidual(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The measured and the fitted time of a call that moved `nbytes` bytes. `error`: as for `Residual`."""

    nbytes: int
    seconds: float
    fitted_s: float
    error: float


class PrefillTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The time of a prefill in seconds: `fixed_s` + `per_token_s` sum(L) + `per_token_squared_s` sum(L^2), for prompts
    of L tokens.

    error, worst_error: the mean and the largest absolute relative error of the fit; None if they are not known
    residuals: one for each measured point; published times have none
    """

    fixed_s: _NotNegative
    per_token_s: _NotNegative
    per_token_squared_s: float
    error: float | None = None
    worst_error: float | None = None
    residuals: list[Residual] = []

    def of(self, tokens: float, squares: float) -> float:
        """Return the seconds of a prefill. `tokens`: the number of tokens of all prompts. `squares`: the sum of the
        prompts' squared lengths."""
        return self.fixed_s + self.per_token_s * tokens + self.per_token_squared_s * squares

    @property
    def saturating_tokens(self) -> int:
        """The number of tokens at which the fixed cost is `FIXED_SHARE` of a prefill's time. With more tokens,
        computing limits prefills."""
        if not self.per_token_s:
            return 1
        return max(1, round(self.fixed_s * (1 - FIXED_SHARE) / FIXED_SHARE / self.per_token_s))


class DecodeTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The time of a decoding step in seconds: `fixed_s` + `per_context_token_s` sum(context) + `per_request_s`
    requests. It is for batches of at least `from_batch` requests. The other fields are as for `PrefillTimes`."""

    fixed_s: _NotNegative
    per_context_token_s: _NotNegative
    per_request_s: _NotNegative
    from_batch: _Count = 1
    error: float | None = None
    worst_error: float | None = None
    residuals: list[Residual] = []

    def of(self, requests: int, context: float) -> float:
        """Return the seconds of a decoding step of this many requests. `context`: the tokens of all their contexts
        together."""
        return self.fixed_s + self.per_context_token_s * context + self.per_request_s * requests


class TransferTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The time of one client's transfer in seconds: `latency_s` + `per_byte_s` bytes. The other fields are as for
    `PrefillTimes`."""

    latency_s: _NotNegative
    per_byte_s: _Positive
    error: float | None = None
    worst_error: float | None = None
    residuals: list[TransferResidual] = []


class StoreTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The times that one client on the engine's host needs to `read` from the store and to `write` to it."""

    read: TransferTimes
    write: TransferTimes

    @property
    def bytes_per_s(self) -> float:
        """The rate of large transfers in the slower direction, in bytes a second."""
        return 1 / max(self.read.per_byte_s, self.write.per_byte_s)


class Degree(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An engine with one degree of tensor parallelism.

    decode: the times for batches of different sizes, by rising `from_batch`; the first are for batches of 1 or more
    kv_tokens: for each pipeline degree, the number of tokens that an engine's memory holds; other degrees do not fit
    the memory
    """

    tp: _Count
    prefill: PrefillTimes
    decode: list[DecodeTimes]
    kv_tokens: dict[_Count, _Count]

    def step_s(self, requests: int, context: float) -> float:
        """Return the seconds of a decoding step without a pipeline."""
        for times in reversed(self.decode):
            if requests >= times.from_batch:
                return times.of(requests, context)
        raise AssertionError("the times of decoding have no entry for a batch of 1")


class Contention(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The factors by which a prefill and a decoding step take longer while another engine of the same node works.
    Engines of one node may share memory, caches, power or cores."""

    prefill: _AtLeastOne = 1.0
    decode: _AtLeastOne = 1.0


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An engine, as the planner models it.

    kv_bytes_per_token: the bytes of a token's KV in all layers and heads
    measured: whether `kvstore plan profile` measured the engine; otherwise the profile is published or written by hand,
    and `source` names its origin
    store: the times of transfers to and from the store; None if not measured
    contention: how much engines of one node slow each other down
    """

    name: str
    model: str
    gpu: str
    source: str
    measured: bool
    kv_bytes_per_token: _Count
    degrees: list[Degree]
    stage_s: _NotNegative = 0.001
    store: StoreTimes | None = None
    contention: Contention = Contention()

    def __post_init__(self) -> None:
        if not self.degrees:
            raise ValueError("degrees: expected at least one degree of tensor parallelism")
        for degree in self.degrees:
            starts = [times.from_batch for times in degree.decode]
            if starts[:1] != [1] or starts != sorted(set(starts)):
                raise ValueError(f"tp {degree.tp}, decode: expected from_batch to rise from 1, found {starts}")
            if not degree.kv_tokens:
                raise ValueError(f"tp {degree.tp}: kv_tokens is empty; expected at least one pipeline degree")
        tps = [degree.tp for degree in self.degrees]
        if len(set(tps)) != len(tps):
            raise ValueError(f"degrees: expected each tp once, found {tps}")

    def degree(self, tp: int) -> Degree:
        """Return the profile of this tensor-parallel degree. Raises `KeyError`."""
        for degree in self.degrees:
            if degree.tp == tp:
                return degree
        raise KeyError(tp)

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Return the pairs (tp, pp) that fit the memory."""
        return [(degree.tp, pp) for degree in self.degrees for pp in sorted(degree.kv_tokens)]


_decoder = msgspec.json.Decoder(Profile)


def shipped() -> list[str]:
    """Return the names of the profiles that come with kvstore."""
    folder = importlib.resources.files(__package__) / "profiles"
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def read_profile(given: str) -> Profile:
    """Read the profile in a file, or the shipped profile with this name. Raises `ProfileError`."""
    if given in shipped():
        data = (importlib.resources.files(__package__) / "profiles" / f"{given}.json").read_bytes()
    else:
        try:
            data = Path(given).read_bytes()
        except OSError as error:
            raise ProfileError(
                f"{given}: {error.strerror}; expected a file that `kvstore plan profile` wrote, or one of "
                f"{', '.join(shipped())}"
            ) from error
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProfileError(
            f"{given}: {error}; expected what this version's `kvstore plan profile` writes: measure the engine again. "
            "`kvstore plan profile --distserve` converts the coefficients of DistServe"
        ) from error


def write_profile(profile: Profile, path: Path) -> None:
    """Write a file that `read_profile` reads. Raises `OSError`."""
    replace_file(path, msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n")


# ---- DistServe's -------------------------------------------------------------------------------------------------


class _Coefficients(msgspec.Struct, forbid_unknown_fields=True):
    """Coefficients in milliseconds, in the form of DistServe's simulator."""

    decoding_large_small_bs_threshold: int
    prefill: tuple[float, float, float]
    decoding_smallbs: tuple[float, float, float]
    decoding_largebs: tuple[float, float, float]


_decode_distserve: Final = msgspec.json.Decoder(dict[str, dict[int, _Coefficients]]).decode


def from_distserve(coefficients: bytes, capacities: Iterable[Sequence[str]], model: str) -> list[Degree]:
    """Return a model's degrees from DistServe's files. Raises `ProfileError`.

    coefficients: the content of `profiler-a100-80g.*.json`
    capacities: the rows of `max_num_tokens.csv` (model, tp, pp, max_num_tokens)
    """
    try:
        models = _decode_distserve(coefficients)
    except msgspec.DecodeError as error:
        raise ProfileError(f"not the coefficients of DistServe's simulator: {error}") from error
    if model not in models:
        raise ProfileError(f"the coefficients have no model {model!r}: expected one of {', '.join(models)}")
    memory: dict[int, dict[int, int]] = {}
    for name, tp, pp, tokens in capacities:
        if name == model:
            memory.setdefault(int(tp), {})[int(pp)] = int(tokens)
    return [_degree(tp, found, memory[tp]) for tp, found in sorted(models[model].items()) if tp in memory]


def _degree(tp: int, found: _Coefficients, kv_tokens: dict[int, int]) -> Degree:
    def seconds(values: tuple[float, float, float]) -> tuple[float, float, float]:
        return values[0] / 1000, values[1] / 1000, values[2] / 1000

    small, large = seconds(found.decoding_smallbs), seconds(found.decoding_largebs)
    decode = [DecodeTimes(*small), DecodeTimes(*large, from_batch=found.decoding_large_small_bs_threshold)]
    return Degree(tp, PrefillTimes(*seconds(found.prefill)), decode, kv_tokens)
