"""Profiles: the fits to measured times, and the files that are read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvstore_serving.planning.fitting import TimeSample, TooFew, TransferSample, fit_decode, fit_prefill, fit_transfer
from kvstore_serving.planning.model_config import ModelConfigError, kv_bytes_per_token
from kvstore_serving.planning.profile import (
    DecodeTimes,
    PrefillTimes,
    ProfileError,
    StoreTimes,
    from_distserve,
    read_profile,
    shipped,
    write_profile,
)
from tests.unit.test_plan_search import small_profile


def test_fits_recover_the_parameters_of_generated_samples() -> None:
    prefill, decode = PrefillTimes(0.02, 1e-4, 3e-9), DecodeTimes(0.01, 2e-7, 5e-4)
    loads = [(requests, tokens) for requests in (1, 2, 4, 8) for tokens in (100, 700, 3000)]
    found = fit_prefill([TimeSample(b, n, prefill.of(b * n, b * n**2)) for b, n in loads])
    assert [(each.requests, each.tokens) for each in found.residuals] == loads
    assert (found.fixed_s, found.per_token_s, found.per_token_squared_s) == pytest.approx((0.02, 1e-4, 3e-9))
    assert (found.error, found.worst_error) == pytest.approx((0, 0), abs=1e-9)
    step = fit_decode([TimeSample(b, n, decode.of(b, b * n)) for b, n in loads])
    assert (step.fixed_s, step.per_context_token_s, step.per_request_s) == pytest.approx((0.01, 2e-7, 5e-4))


def test_fits_weigh_relative_errors_and_are_never_negative() -> None:
    random = np.random.default_rng(0)
    falling = [TimeSample(1, n, 0.1 - n * 1e-5 + random.normal(0, 1e-4)) for n in (100, 200, 400, 800, 1600)]
    found = fit_prefill(falling)
    assert min(found.fixed_s, found.per_token_s, found.per_token_squared_s) >= 0
    noisy = [TimeSample(1, n, (0.01 + n * 1e-4) * factor) for n in (10, 10_000) for factor in (0.9, 1.1, 1.0)]
    noisy += [TimeSample(1, 1000, 0.11)]
    assert fit_prefill(noisy).of(10, 100) == pytest.approx(0.011, rel=0.1), "the short one counts as much"


def test_too_few_samples_are_an_error() -> None:
    with pytest.raises(TooFew, match="2 different loads"):
        fit_prefill([TimeSample(1, 100, 0.1), TimeSample(1, 100, 0.2), TimeSample(1, 200, 0.2)])


def test_shipped_profiles_are_valid_and_name_their_source() -> None:
    assert "opt-13b-a100-80g" in shipped()
    for name in shipped():
        profile = read_profile(name)
        assert not profile.measured and "DistServe" in profile.source and profile.name == name
        for degree in profile.degrees:
            assert 0.001 < degree.prefill.of(512, 512**2) < 1 and 0.001 < degree.step_s(8, 8 * 1000) < 0.2
    thirteen = read_profile("opt-13b-a100-80g").degree(1)
    assert thirteen.prefill.fixed_s == pytest.approx(0.01810254647486372), "seconds, from milliseconds"
    assert thirteen.step_s(94, 0) == pytest.approx((19.934702624895458 + 94 * 0.03850697740828398) / 1000)
    assert thirteen.step_s(95, 0) == pytest.approx((7.1661889468253595 + 95 * 0.15831096191764046) / 1000)


def test_a_profile_reads_back_as_written(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    write_profile(small_profile(), path)
    assert read_profile(str(path)) == small_profile()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"degrees": []}, "expected at least one degree"),
        ({"extra": 1}, "unknown field `extra`"),
        ({"kv_bytes_per_token": 0}, "kv_bytes_per_token"),
        ({"stage_s": -1}, "stage_s"),
    ],
)
def test_an_invalid_profile_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(msgspec.to_builtins(small_profile(), str_keys=True) | change))
    with pytest.raises(ProfileError, match=message):
        read_profile(str(path))


def test_pieces_of_decoding_must_begin_at_one_and_rise(tmp_path: Path) -> None:
    document = msgspec.to_builtins(small_profile(), str_keys=True)
    document["degrees"][0]["decode"][0]["from_batch"] = 2
    path = tmp_path / "p.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ProfileError, match="expected from_batch to rise from 1, found"):
        read_profile(str(path))
    with pytest.raises(ProfileError, match=r"expected a file that .* or one of opt-13b"):
        read_profile(str(tmp_path / "no.json"))


def test_distserves_files_are_read() -> None:
    one = {"decoding_large_small_bs_threshold": 95, "prefill": [18.1, 0.1, 7e-6]}
    one |= {"decoding_smallbs": [19.9, 6e-4, 0.04], "decoding_largebs": [7.2, 5e-4, 0.16]}
    coefficients = json.dumps({"m": {"1": one, "8": one}}).encode()
    [degree] = from_distserve(coefficients, [("m", "1", "2", "163008"), ("other", "8", "1", "5")], "m")
    assert (degree.tp, degree.kv_tokens, degree.decode[1].from_batch) == (1, {2: 163008}, 95)
    with pytest.raises(ProfileError, match="have no model 'x': expected one of m"):
        from_distserve(coefficients, [], "x")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # Qwen2.5-7B, Llama-3.1-8B, DeepSeek-V3 (MLA), and a model of several parts
        ({"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 3584}, 57_344),
        ({"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}, 131_072),
        (
            {"num_hidden_layers": 61, "num_attention_heads": 128, "hidden_size": 7168, "kv_lora_rank": 512}
            | {"qk_rope_head_dim": 64},
            70_272,
        ),
        ({"text_config": {"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8, "dtype": "float32"}}, 512),
    ],
)
def test_the_kv_per_token_follows_from_the_models_config(
    tmp_path: Path, config: dict[str, object], expected: int
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"torch_dtype": "bfloat16", "vocab_size": 5} | config))
    assert kv_bytes_per_token(file) == expected


@pytest.mark.parametrize("text", ["[]", "{}", '{"num_hidden_layers": 0}', "no JSON"])
def test_a_config_without_shape_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ModelConfigError, match=re.escape(str(file))):
        kv_bytes_per_token(file)


# ---- residuals and transfers -------------------------------------------------------------------------------------


def test_a_fit_reports_each_points_error() -> None:
    samples = [TimeSample(b, n, 0.01 + b * n * 1e-4) for b in (1, 2, 4) for n in (100, 1000)]
    samples[3] = TimeSample(2, 1000, 0.42)  # twice the value that the other samples give
    fits: list[PrefillTimes | DecodeTimes] = [fit_prefill(samples), fit_decode(samples)]
    for found in fits:
        assert [(each.requests, each.tokens, each.seconds) for each in found.residuals] == [
            (each.requests, each.tokens, each.seconds) for each in samples
        ]
        for each in found.residuals:
            assert each.error == pytest.approx(each.fitted_s / each.seconds - 1)
        errors = [abs(each.error) for each in found.residuals]
        assert found.error == pytest.approx(sum(errors) / len(errors))
        assert found.worst_error == max(errors) == errors[3] and found.residuals[3].error < -0.2, "it was longer"


def test_a_transfer_has_a_latency_and_a_rate() -> None:
    sizes = (1 << 14, 1 << 17, 1 << 20, 1 << 26)
    found = fit_transfer([TransferSample(size, 0.0005 + size / 2e9) for size in sizes])
    assert found.latency_s == pytest.approx(0.0005) and found.per_byte_s == pytest.approx(1 / 2e9)
    assert found.worst_error == pytest.approx(0, abs=1e-9)
    assert [each.nbytes for each in found.residuals] == list(sizes)
    # A small transfer with a relative error of a half counts as much as a large one; least squares of seconds would
    # ignore it.
    noisy = [TransferSample(size, (0.0005 + size / 2e9) * factor) for size in sizes for factor in (0.9, 1.1)]
    weighed = fit_transfer(noisy)
    assert weighed.latency_s + weighed.per_byte_s * sizes[0] == pytest.approx(0.0005, rel=0.1)


def test_a_transfer_rate_is_found_though_large_transfers_seem_no_slower() -> None:
    found = fit_transfer([TransferSample(1000, 0.002), TransferSample(100_000, 0.001)])
    assert found.per_byte_s > 0 and found.latency_s >= 0 and (found.worst_error or 0) > 0.3, (
        "and says that it does not fit"
    )
    with pytest.raises(TooFew, match="1 different loads"):
        fit_transfer([TransferSample(1000, 0.002), TransferSample(1000, 0.001)])


def test_residuals_and_transfers_read_back_as_written(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    prefill = fit_prefill([TimeSample(b, n, 0.01 + b * n * 1e-4) for b in (1, 2) for n in (100, 1000)])
    moved = fit_transfer([TransferSample(size, 0.001 + size / 1e9) for size in (1000, 100_000)])
    plain = small_profile()
    degree = msgspec.structs.replace(plain.degrees[0], prefill=prefill)
    made = msgspec.structs.replace(plain, degrees=[degree], store=StoreTimes(moved, moved))
    write_profile(made, path)
    assert read_profile(str(path)) == made
    assert made.store is not None and made.store.bytes_per_s == pytest.approx(1e9)


def test_a_profile_of_an_older_version_is_refused_with_a_remedy(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(msgspec.to_builtins(small_profile(), str_keys=True) | {"store_bytes_per_s": 1e9}))
    with pytest.raises(ProfileError, match=r"unknown field `store_bytes_per_s`.*: measure the engine again"):
        read_profile(str(path))
