"""The file of ``--auth``: which contents are refused, with which errors; changes of the file; tokens; the audit log."""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
from pathlib import Path

import pytest

from kvstore.auth import audit as audit_log
from kvstore.auth.audit import Audit
from kvstore.auth.checking import KnownTokens
from kvstore.auth.editing import add, rotate
from kvstore.auth.policy import AuthFile, AuthFileError, member_cookie, parse_policy
from kvstore.auth.rights import ALL, Rights, own, verbs_of
from kvstore.auth.tokens import hash_token, make_token, matches, name_in
from kvstore.store.quotas import Quota, Quotas
from kvstore.wire import WireError
from tests.support.logins import keep_as_before

GOOD = """
[[principals]]
name = "one"
tenant = "a"
verbs = ["read"]
tokens = ["scrypt:4:1:1:MTIzNDU2Nzg=:MTIzNDU2NzgxMjM0NTY3OA=="]
"""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("[[principals]]", "[[principal]]"), "unknown field `principal`"),
        (('verbs = ["read"]', 'verb = ["read"]'), "unknown field `verb`"),
        (('verbs = ["read"]', 'verbs = ["raed"]'), "verb 'raed': expected one of read, write, delete, admin, monitor"),
        (('verbs = ["read"]', "verbs = []"), "no verbs"),
        (('name = "one"', 'name = "o n"'), "expected a name of 1 to 64 letters"),
        (('tenant = "a"', 'tenant = ""'), "tenant ''"),
        (("scrypt:4:", "scrypt:3:"), "token 1: expected scrypt with N"),
        (("scrypt:4:", "scrypt:1048576:"), "of at most (131072, 32, 16)"),
        (("scrypt:4:", "md5:4:"), "token 1: expected scrypt"),
        (("scrypt:4:1:1:", "secret"), "as `kvstore auth add` writes it"),
        (("scrypt:4:1:1:", "sha256:"), "expected sha256:SALT:HASH"),
        (("[[principals]]", f"[tenants.a]\nmemory = {'9' * 4301}\n[[principals]]"), "not TOML"),
        (("[[principals]]", f"x = {'[' * 1000}\n[[principals]]"), "not TOML"),
        (("[[principals]]", f"x = {'{y = ' * 1000}\n[[principals]]"), "not TOML"),
        (("[[principals]]", f"x{'.a' * 30_000} = 1\n[[principals]]"), "a key has more than eight parts"),
        (("[[principals]]", f"[x{'.a' * 30_000}]\n[[principals]]"), "a key has more than eight parts"),
        (("[[principals]]", f"[tenants.a]\nmemory = {10**26}\n[[principals]]"), "at most 9223372036854775807"),
        (("[[principals]]", "[tenants.a]\nmemory = '99999999TiB'\n[[principals]]"), "at most 9223372036854775807"),
        (("[[principals]]", "[tenants.a]\nrequests_per_s = nan\n[[principals]]"), "requests_per_s is nan: expected 0"),
        (("[[principals]]", "[tenants.a]\nrequests_per_s = inf\n[[principals]]"), "requests_per_s is inf: expected 0"),
        (("[[principals]]", 'member_secret = "short"\n[[principals]]'), "member_secret has 5 characters"),
        (
            ("[[principals]]", '[tenants.a]\nmemory = "lots"\n[[principals]]'),
            "memory: 'lots' is not a size",
        ),
        (("[[principals]]", "[tenants.a]\nrequests_per_s = -1\n[[principals]]"), "expected 0 or more"),
        (("[[principals]]", "[tenants.a]\nmemory = 1\nmemory_guaranteed = 2\n[[principals]]"), "is more than memory"),
        (("[[principals]]", "[[principals]"), "not TOML"),
    ],
)
def test_a_wrong_file_is_refused_and_the_error_repeats_no_hash(change: tuple[str, str], said: str) -> None:
    assert parse_policy(GOOD, "f").principals["one"].rights.tenant == "a"
    with pytest.raises(AuthFileError, match=re.escape(said)) as refused:
        parse_policy(GOOD.replace(*change), "auth.toml")
    assert "auth.toml" in str(refused.value)
    assert "MTIz" not in str(refused.value)


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "auth.toml"
    file.write_text(GOOD)
    file.chmod(0o644)
    with pytest.raises(AuthFileError, match="mode is 644, so others may read or change it: run chmod 600"):
        AuthFile(file)


def test_a_missing_or_empty_file_is_refused_at_once(tmp_path: Path) -> None:
    file = tmp_path / "auth.toml"
    os.mkfifo(file, 0o600)
    with pytest.raises(AuthFileError, match="not a regular file"):
        AuthFile(file)
    file.unlink()
    file.touch(0o600)
    with pytest.raises(AuthFileError, match="it is empty"):
        AuthFile(file)


def test_a_changed_file_is_read_again_and_the_last_valid_policy_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "auth.toml"
    add(file, "one", "a", ["read"])
    auth = AuthFile(file)
    assert auth.read_again() is None and auth.read_again(asked=True) is None, "it is as it was"
    good = file.read_text()
    file.write_text("")
    assert auth.read_again() is None and "the previous policy stays in force" in caplog.text
    file.write_text(good)
    assert auth.read_again() is None, "it is the one that was read before"
    add(file, "two", "a", ["read"])
    policy = auth.read_again()
    assert policy is not None and policy.principals.keys() == {"one", "two"}
    assert auth.policy.principals.keys() == {"one"}, "who uses it puts it in force"


def test_tokens_that_a_new_policy_keeps_stay_known(tmp_path: Path) -> None:
    file = tmp_path / "auth.toml"
    tokens = {name: add(file, name, "a", ["read"]).encode() for name in ("stays", "goes")}
    auth = AuthFile(file)
    known = KnownTokens(auth)
    for token in tokens.values():
        found = auth.policy.login(token)
        assert found is not None and known.remember(token, found)
    rotate(file, "goes", end_old=True)
    policy = auth.read_again()
    assert policy is not None
    known.adopt(policy)
    assert auth.policy is policy
    assert known.find(tokens["stays"]) is not None and known.find(tokens["goes"]) is None


def test_tokens_of_earlier_releases_are_accepted_and_only_they_take_long(tmp_path: Path) -> None:
    file = tmp_path / "auth.toml"
    tokens = {name: add(file, name, "a", ["read"]) for name in ("old", "new")}
    assert not AuthFile(file).policy.slow
    keep_as_before(file, {"old": tokens["old"]})
    policy = AuthFile(file).policy
    assert policy.slow
    old, new = (token.encode() for token in tokens.values())
    assert policy.recognize(old) is None and policy.recognize(new) is not None
    found = policy.login(old)
    assert found is not None and found[0].principal == "old"
    assert policy.login(new) is not None
    for wrong in (b"", b"kvs_old.", old[:-1], b"kvs_nobody." + b"A" * 43, b"\xff" * 300):
        assert policy.recognize(wrong) is None and policy.login(wrong) is None


def test_an_operators_edits_survive_a_new_principal_or_token(tmp_path: Path) -> None:
    file = tmp_path / "auth.toml"
    first = add(file, "one", "a", ["read", "write"], ["Qwen/*"], 1 << 30)
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
    file.write_text(file.read_text().replace("[tenants.a]", "# ours\n[tenants.a]"))
    add(file, "two", "b", ["admin"])
    second = rotate(file, "one")
    policy = AuthFile(file).policy
    assert "# ours" in file.read_text() and policy.limits_of("a").memory == 1 << 30
    for token in (first, second):
        found = policy.login(token.encode())
        assert found is not None and found[0].principal == "one" and found[0].models == ("Qwen/*",)
    third = rotate(file, "one", end_old=True)
    policy = AuthFile(file).policy
    assert [policy.login(token.encode()) is not None for token in (first, second, third)] == [False, False, True]
    assert len(policy.member_secret) == 64
    with pytest.raises(AuthFileError, match="principal 'one' exists"):
        add(file, "one", "a", ["read"])
    with pytest.raises(AuthFileError, match="no principal 'three': expected one of one, two"):
        rotate(file, "three")
    with pytest.raises(AuthFileError, match="tenant 'a' has memory = 1073741824 there, but the quota given is 5"):
        add(file, "four", "a", ["read"], quota_bytes=5)


def test_a_token_matches_its_own_hash_only() -> None:
    token, other = make_token("n"), make_token("n")
    kept = hash_token(token)
    assert matches(token.encode(), kept) and not matches(other.encode(), kept)
    assert token not in kept
    assert name_in(token.encode()) == "n"
    for wrong in (b"", b"kvs_", b"kvs_n", b"kvs_a/b.c", b"n.secret", b"\xff" * 9, b"kvs_n." + b"x" * 1000):
        assert name_in(wrong) == ""


def test_credentials_decide_the_tenant_whatever_the_namespace_says() -> None:
    rights = Rights("p", "a", verbs_of(["read"]))
    plain = b'{"block_bytes":1,"model":"m","version":1}'
    owned = b'{"block_bytes":1,"model":"m","tenant":"a","version":1}'
    assert own(plain, rights) == own(owned, rights) == owned
    assert own(b'{"tenant":"b","tenant":"a","model":"m","block_bytes":1,"version":1}', rights) == owned
    assert own(b'{"tenant":"b","model":"m"}', ALL) == b'{"tenant":"b","model":"m"}'
    for foreign in (b'{"tenant":"b","model":"m"}', b'{"tenant":"\\u0062","model":"m"}', b'{"tenant":null,"model":"m"}'):
        with pytest.raises(WireError, match="names a tenant other than 'a'"):
            own(foreign, rights)


def test_a_members_cookie_is_valid_for_one_node_only() -> None:
    mine = member_cookie("s" * 32, "a", "h", 1)
    assert mine == member_cookie("s" * 32, "a", "h", 1)
    others = [("a", "h", 2), ("a", "i", 1), ("b", "h", 1)]
    assert len({mine, *(member_cookie("s" * 32, *other) for other in others)}) == 4


def test_the_audit_log_is_bounded_and_rotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_log, "MAX_AUDIT_BYTES", 4096)
    file = tmp_path / "audit.jsonl"
    first, second = Audit(str(file), shard=0), Audit(str(file), shard=1)
    for number in range(300):
        (first, second)[number % 2].record("purge", detail="x" * 2000, number=number)
    first.close()
    second.close()
    lines = [
        json.loads(line)
        for name in ("audit.jsonl.1", "audit.jsonl")
        for line in (tmp_path / name).read_text().splitlines()
    ]
    assert max(len(line["detail"]) for line in lines) == 512
    assert all((tmp_path / name).stat().st_size < 4096 + 1024 for name in ("audit.jsonl.1", "audit.jsonl"))
    assert {line["shard"] for line in lines} == {0, 1}

    monkeypatch.undo()
    flood = Audit(str(tmp_path / "flood"))
    for _ in range(1000):
        flood.record("login_failed")
    flood._filled -= 1.0
    flood.record("login_failed")
    flood.close()
    lines = [json.loads(line) for line in (tmp_path / "flood").read_text().splitlines()]
    assert 201 <= len(lines) < 300
    assert lines[-1]["lines_left_out"] >= 700


def test_the_audit_log_blocks_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match=r"No such device|not a regular file"):
        Audit(str(pipe))
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(OSError, match="not a regular file"):
        Audit(str(pipe))
    os.close(reader)

    monkeypatch.setattr(audit_log, "MAX_AUDIT_BYTES", 1000)
    monkeypatch.setattr(audit_log, "OVER_BYTES", 1000)
    file = tmp_path / "audit.jsonl"
    audit = Audit(str(file))
    with file.open() as stranger:
        fcntl.flock(stranger, fcntl.LOCK_EX)
        for number in range(100):
            audit.record("purge", number=number)
        assert 1000 < file.stat().st_size < 2200, "it grows on for a while, and no line waits for the lock"
    audit.record("purge", number=100)
    [line] = map(json.loads, file.read_text().splitlines())
    assert line["number"] == 100 and line["lines_left_out"] > 50
    file.rename(tmp_path / "moved")
    os.mkfifo(file)
    audit.record("purge", number=101)
    file.unlink()
    audit.record("purge", number=102)
    [line] = map(json.loads, file.read_text().splitlines())
    assert line["number"] == 102 and line["lines_left_out"] == 1
    audit.close()


class Held:
    def __init__(self, tenant: str, segments: int) -> None:
        self.tenant = tenant
        self.segments = dict.fromkeys(range(segments), 0)
        self.transient: set[int] = set()


def test_quotas_decide_which_namespace_is_evicted_for_which() -> None:
    quotas = {"guaranteed": Quota(guaranteed=4), "bounded": Quota(most=2)}
    rules = Quotas(lambda name: quotas.get(name, Quota()))
    noisy, noisy2, guaranteed, bounded = Held("noisy", 5), Held("noisy", 2), Held("guaranteed", 3), Held("bounded", 2)
    members = [noisy, noisy2, guaranteed, bounded]
    assert rules.victims(noisy, members, 12) == ([noisy2], True)  # beyond its share, so its own blocks are evicted
    assert rules.victims(guaranteed, members, 12) == ([noisy, noisy2], False)
    assert not rules.may_take(bounded, members) and rules.may_take(noisy, members)
    assert rules.victims(Held("new", 0), members, 12) == ([noisy, noisy2], False)
    alone = Held("a", 3)
    assert rules.victims(alone, [alone], 3) == ([], True)
