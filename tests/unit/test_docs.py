"""The pages under docs/: links, the flag reference, and the messages that have a cure."""

import dataclasses
import re
from pathlib import Path

import pytest

from megatron_trace import config, rl_config
from megatron_trace.testing.programs import load_program

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
)


def tool(name):
    return load_program(ROOT / "tools" / f"{name}.py")


def prose(page):
    """Gives a page without its code."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "`code`", re.sub(r"^    .*$", "", text, flags=re.MULTILINE))


def anchors(page):
    """Gives the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name}: {link} leads nowhere"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{page.name}: {link} names no heading"


def test_the_index_names_every_page():
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").glob("*.md")}
    missing = {page for page in pages if f"({page})" not in index} - {"README.md"}
    assert not missing


def test_the_flag_reference_is_up_to_date():
    module = tool("make_flag_reference")
    assert module.PAGE.read_text() == module.reference(), "run tools/make_flag_reference.py"


def test_the_flag_reference_has_every_dataclass_of_settings():
    settings = {
        value
        for module in (config, rl_config)
        for value in vars(module).values()
        if isinstance(value, type)
        and dataclasses.is_dataclass(value)
        and value.__module__ == module.__name__
    }
    assert settings == {group[1] for group in tool("make_flag_reference").GROUPS}


def listed_messages():
    text = (ROOT / "docs" / "when_it_goes_wrong.md").read_text()
    return [
        m.replace("\\|", "|") for m in re.findall(r"^\| `([^`]+)` \|", text, flags=re.MULTILINE)
    ]


@pytest.fixture(scope="module")
def raised():
    return [text for _, text in tool("error_messages").error_messages()]


def test_many_messages_have_a_cure():
    assert len(listed_messages()) == len(set(listed_messages())) > 40


@pytest.mark.parametrize("message", listed_messages())
def test_a_message_with_a_cure_is_raised_somewhere(raised, message):
    parts = [re.escape(part) for part in message.split("...")]
    pattern = re.compile(".*".join(parts), flags=re.DOTALL)
    assert any(pattern.fullmatch(text) for text in raised)


def test_a_message_that_nobody_raises_is_noticed(raised):
    assert not any("no such message of ours" in text for text in raised)
    assert not any(re.fullmatch("hint_layers names a layer thrice.*", text) for text in raised)
