"""The commands that README.md and docs/ show to readers work as written, on a real server."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.documents import DOCUMENTS, FIRST_CLUSTER, Block, Reader, blocks_of
from tests.support.harness import ROOT, Server, environment

MEMORY = "512MiB"
OF_TWO_COMMANDS = {
    "--drain-seconds",
    "--log-format",
    "--log-level",
    "--policy",
}  # options that both `kvstore-server` and `kvstore proxy` have
RUN = [file for file in DOCUMENTS if file != FIRST_CLUSTER and any(block.runs for block in blocks_of(file))]


def name_of(file: Path) -> str:
    return str(file.relative_to(ROOT))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a disk tier, for all documents."""
    folder = tmp_path_factory.mktemp("store")
    server = Server(folder / "server.log", "--memory", MEMORY, "--disk", str(folder / "disk"), "--disk-size", "256MiB")
    yield server
    server.kill()


@pytest.mark.parametrize("file", DOCUMENTS, ids=name_of)
def test_every_command_block_runs_or_says_why_not(file: Path) -> None:
    for block in blocks_of(file):
        if block.language in ("bash", "sh", "console"):
            pytest.fail(f"{block}: a block of {block.language}: commands are `shell` everywhere")
        if not block.language and block.looks_like_commands:
            pytest.fail(f"{block}: commands without a language: expected ```shell")


@pytest.mark.parametrize("file", RUN, ids=name_of)
def test_a_documents_blocks_work_as_written(file: Path, store: Server, tmp_path: Path) -> None:
    reader = Reader(
        tmp_path,
        store.endpoint,
        {
            "tcp://127.0.0.1:7070": store.endpoint,
            "127.0.0.1:7070": store.endpoint.removeprefix("tcp://"),
            # A simulation takes longer with longer answers, and runs again for each seed and each kind of engine.
            "--output-tokens 200 ": "--output-tokens 5 --seeds 1 ",
            "--gpus-per-node 4": "--gpus-per-node 2",
        },
    )
    for block in blocks_of(file):
        if block.runs:
            reader.run(block)


def test_every_command_that_starts_an_engine_lets_it_finish_requests() -> None:
    """vLLM's default for --shutdown-timeout is 0 s, in which no request can finish."""
    commands = []
    for file in [*DOCUMENTS, *(ROOT / "examples").glob("*.py"), *(ROOT / "kvstore_client" / "vllm").rglob("*.py")]:
        commands += re.findall(r"vllm serve (?=[\w/.-]+ -).*", file.read_text())
    assert len(commands) >= 9, "the search itself works"
    for command in commands:
        assert "--shutdown-timeout" in command, command


@pytest.mark.parametrize("file", DOCUMENTS, ids=name_of)
def test_every_file_named_in_a_document_exists(file: Path) -> None:
    for path in re.findall(
        r"`((?:kvstore\w*|cext|tests|docs|docker|examples|scripts|benchmarks)/[\w./-]+)`", file.read_text()
    ):
        assert (ROOT / path).exists(), f"{name_of(file)} names {path}, which is not there"


def test_the_readme_is_short_and_begins_with_its_two_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 650
    first = text.splitlines()[:60]
    for command in ("make serve", "make test"):
        assert any(line.startswith(command) for line in first), command


def test_an_option_has_its_row_on_one_page_only() -> None:
    pages: dict[str, set[str]] = {}
    for file in sorted((ROOT / "docs").rglob("*.md")):
        for cell in re.findall(r"^\| *(`--[^|]*)\|", file.read_text(encoding="utf-8"), re.MULTILINE):
            for option in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", cell):
                pages.setdefault(option, set()).add(file.name)
    assert len(pages) > 40, "the search itself works"
    twice = {option: names for option, names in pages.items() if len(names) > 1 and option not in OF_TWO_COMMANDS}
    assert not twice, "an option has one row, and other pages link to it"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    site = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=ROOT,
        env=environment(NO_MKDOCS_2_WARNING="1"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    reference = (site / "reference" / "client" / "index.html").read_text(encoding="utf-8")
    for name in ("load_prefix", "get_into", "purge", "for_model", "BlockSizeMismatch", "SetResult"):
        assert name in reference, f"the API reference lacks {name}"


def test_a_failing_block_is_noticed(tmp_path: Path) -> None:
    reader = Reader(tmp_path, "tcp://127.0.0.1:1", {})
    for language, text in (("python", "raise SystemExit(3)\n"), ("shell", "false\n"), ("shell", "true | false\n")):
        with pytest.raises(AssertionError, match="ended with"):
            reader.run(Block(ROOT / "README.md", 1, language, text, ""))
