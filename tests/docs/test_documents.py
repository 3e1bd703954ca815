"""Every command that README and handbook show runs and writes what is shown; every claim about commands and files
holds."""

import re
from pathlib import Path

import pytest
from tests.docs.blocks import DOCUMENTS, ROOT, check_block, read_blocks, run_block

from drumline.cli.app import COMMANDS

README = (ROOT / "README.md").read_text(encoding="utf-8")
SUBJECTS = 18


def name(document: Path) -> str:
    return str(document.relative_to(ROOT))


def run_document(document: Path, folder: Path, *, with_slow: bool) -> None:
    for block in read_blocks(document.read_text(encoding="utf-8")):
        if block.is_run and (with_slow or not block.is_slow):
            check_block(block, run_block(block, folder))


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_the_quick_commands_of_a_document_run_and_write_what_it_shows(document, tmp_path):
    run_document(document, tmp_path, with_slow=False)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_all_commands_of_a_document_run_and_write_what_it_shows(document, tmp_path):
    if not any(block.is_slow for block in read_blocks(document.read_text(encoding="utf-8"))):
        return
    run_document(document, tmp_path, with_slow=True)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_a_block_that_is_not_run_says_why_or_holds_no_drumline_command(document):
    for block in read_blocks(document.read_text(encoding="utf-8")):
        is_ours = any(command.startswith("drumline") for command in block.commands)
        assert block.is_run or not is_ours or block.options.get("skip"), f"{name(document)}:{block.line}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_every_link_inside_the_repository_leads_somewhere(document):
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", text):
        assert (document.parent / target).exists(), f"{name(document)} links to {target}"


def test_the_table_has_every_subject_once_and_its_states_are_words_that_are_explained():
    rows = re.findall(r"^\| (\d+) \| (.*?) \| (.*?) \|", README, re.M)
    assert [int(number) for number, _, _ in rows] == list(range(1, SUBJECTS + 1))
    assert {state for _, _, state in rows} <= {"works", "partly", "not yet"}


def test_every_command_that_a_document_names_exists():
    for document in DOCUMENTS:
        for command in re.findall(r"`drumline ([a-z]+)", document.read_text(encoding="utf-8")):
            assert command in COMMANDS, f"{name(document)} names drumline {command}"


def test_every_make_target_that_a_document_names_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        assert set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.M)) <= targets, name(document)


def test_every_chapter_is_in_the_index():
    index = (ROOT / "handbook" / "README.md").read_text(encoding="utf-8")
    for chapter in sorted((ROOT / "handbook").glob("[0-9]*.md")):
        assert f"({chapter.name})" in index
