"""The profile of an engine: how long it takes to prefill and to decode, and how many tokens its memory holds.

A profile is a JSON file. `kvstore plan profile` measures one; those in `kvstore_serving/planning/profiles` are
published figures, and say where they are from. Times are linear in what an engine does (DistServe's form):

* a prefill of prompts of L tokens each, a + b sum(L) + c sum(L^2);
* a step of decoding, a + b sum(context) + c requests;
* a transfer to the store or from it, a + b bytes.

Each has its residuals: every measured time beside the fitted one. Those of an engine hold for one degree of tensor
parallelism. With `pp` stages, a stage takes a `pp`-th of them, and `stage_s` more. While another engine of the same
node works, they are longer by the profile's `contention`.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec

# A prefill is as long as it must be for its fixed cost to be so small a share of its time; see `saturating_tokens`.
FIXED_SHARE: Final = 0.2

_Positive = Annotated[float, msgspec.Meta(gt=0)]
_NotNegative = Annotated[float, msgspec.Meta(ge=0)]
_AtLeastOne = Annotated[float, msgspec.Meta(ge=1)]
_Count = Annotated[int, msgspec.Meta(ge=1)]


class ProfileError(ValueError):
    """The profile cannot be read; the message says what is wrong."""


class Residual(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A measured time, of `requests` at once of so many `tokens` each, beside the fitted one. `error`: relative, more
    than 0 where the fitted one is longer."""

    requests: int
    tokens: float
    seconds: float
    fitted_s: float
    error: float


class TransferResidual(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A measured time of a call that moved `nbytes`, beside the fitted one. `error`: as with `Residual`."""

    nbytes: int
    seconds: float
    fitted_s: float
    error: float


class PrefillTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of a prefill: `fixed_s` + `per_token_s` sum(L) + `per_token_squared_s` sum(L^2), for prompts of L tokens.

    `error` and `worst_error`: mean and largest absolute relative error of the fit; None if they are not known.
    `residuals`: of each measured point, none for published times."""

    fixed_s: _NotNegative
    per_token_s: _NotNegative
    per_token_squared_s: float
    error: float | None = None
    worst_error: float | None = None
    residuals: list[Residual] = []

    def of(self, tokens: float, squares: float) -> float:
        """The seconds of prompts with so many tokens in all, the sum of whose squares is `squares`."""
        return self.fixed_s + self.per_token_s * tokens + self.per_token_squared_s * squares

    @property
    def saturating_tokens(self) -> int:
        """The number of tokens from which on a prefill is bound by computing: the fixed cost is `FIXED_SHARE` of it."""
        if not self.per_token_s:
            return 1
        return max(1, round(self.fixed_s * (1 - FIXED_SHARE) / FIXED_SHARE / self.per_token_s))


class DecodeTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of a step of decoding: `fixed_s` + `per_context_token_s` sum(context) + `per_request_s` requests, for
    batches of `from_batch` requests or more. `error` and so on: as with `PrefillTimes`."""

    fixed_s: _NotNegative
    per_context_token_s: _NotNegative
    per_request_s: _NotNegative
    from_batch: _Count = 1
    error: float | None = None
    worst_error: float | None = None
    residuals: list[Residual] = []

    def of(self, requests: int, context: float) -> float:
        """The seconds of a step of so many requests, whose contexts have `context` tokens in all."""
        return self.fixed_s + self.per_context_token_s * context + self.per_request_s * requests


class TransferTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of one client's transfer: `latency_s` + `per_byte_s` bytes. `error` and so on: as with `PrefillTimes`."""

    latency_s: _NotNegative
    per_byte_s: _Positive
    error: float | None = None
    worst_error: float | None = None
    residuals: list[TransferResidual] = []


class StoreTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long one client beside the engine takes to `read` from the store and to `write` there."""

    read: TransferTimes
    write: TransferTimes

    @property
    def bytes_per_s(self) -> float:
        """The rate of large transfers, the slower of both."""
        return 1 / max(self.read.per_byte_s, self.write.per_byte_s)


class Degree(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An engine with one degree of tensor parallelism. `decode`: by rising `from_batch`, the first from 1. `kv_tokens`:
    pipeline degree -> the tokens that an engine's memory holds; degrees that are not there do not fit the memory."""

    tp: _Count
    prefill: PrefillTimes
    decode: list[DecodeTimes]
    kv_tokens: dict[_Count, _Count]

    def step_s(self, requests: int, context: float) -> float:
        """The seconds of a step of decoding without a pipeline."""
        for times in reversed(self.decode):
            if requests >= times.from_batch:
                return times.of(requests, context)
        raise AssertionError("the first piece is for batches of 1")


class Contention(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many times as long a `prefill` and a step of `decode` take while another engine of the same node works:
    engines of one node may share memory, caches, power or cores."""

    prefill: _AtLeastOne = 1.0
    decode: _AtLeastOne = 1.0


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An engine, as the planner sees it. `kv_bytes_per_token`: of all layers and heads. `measured`: by `plan profile`;
    else it is published, or made by hand, and `source` says by whom. `store`: transfers to the store and from it; None:
    not measured. `contention`: what engines of one node take from each other."""

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
                raise ValueError(f"tp {degree.tp}: kv_tokens names no pipeline degree")
        tps = [degree.tp for degree in self.degrees]
        if len(set(tps)) != len(tps):
            raise ValueError(f"degrees: expected each tp once, found {tps}")

    def degree(self, tp: int) -> Degree:
        """Raises `KeyError`."""
        for degree in self.degrees:
            if degree.tp == tp:
                return degree
        raise KeyError(tp)

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """-> the (tp, pp) that fit the memory."""
        return [(degree.tp, pp) for degree in self.degrees for pp in sorted(degree.kv_tokens)]


_decoder = msgspec.json.Decoder(Profile)


def shipped() -> list[str]:
    """-> the names of the profiles that come with kvstore."""
    folder = importlib.resources.files(__package__) / "profiles"
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def read_profile(given: str) -> Profile:
    """The profile in a file, or a shipped one by its name. Raises `ProfileError`."""
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
            "DistServe's coefficients become a profile with `kvstore plan profile --distserve`"
        ) from error


def write_profile(profile: Profile, path: Path) -> None:
    """Write a file that `read_profile` reads. Raises `OSError`."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n")


# ---- DistServe's -------------------------------------------------------------------------------------------------


class _Coefficients(msgspec.Struct, forbid_unknown_fields=True):
    """In milliseconds, as DistServe's simulator has them."""

    decoding_large_small_bs_threshold: int
    prefill: tuple[float, float, float]
    decoding_smallbs: tuple[float, float, float]
    decoding_largebs: tuple[float, float, float]


_decode_distserve: Final = msgspec.json.Decoder(dict[str, dict[int, _Coefficients]]).decode


def from_distserve(coefficients: bytes, capacities: Iterable[Sequence[str]], model: str) -> list[Degree]:
    """-> the degrees of a model from DistServe's files: `profiler-a100-80g.*.json`, and the rows of
    `max_num_tokens.csv` (model, tp, pp, max_num_tokens). Raises `ProfileError`."""
    try:
        models = _decode_distserve(coefficients)
    except msgspec.DecodeError as error:
        raise ProfileError(f"not the coefficients of DistServe's simulator: {error}") from error
    if model not in models:
        raise ProfileError(f"no model {model!r} there: expected one of {', '.join(models)}")
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
