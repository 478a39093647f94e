"""Hooks of mkdocs: adds the generated pages, and turns Markdown as GitHub shows it into what the site's renderer expects."""

import logging
import posixpath
import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

import reference
from mkdocs.structure.files import File, Files

FENCED = re.compile(r"^(?P<fence>`{3,}).*?^(?P=fence)$", re.M | re.S)
ELSEWHERE = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"?(https?://[^\s\">]+)")
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]\n]+)\]\((?P<target>[\w./-]+)(?P<anchor>#[\w-]+)?\)")


def on_files(files: Files, config: Any) -> Files:
    for path, text in reference.pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    here = PurePosixPath(page.file.src_uri)
    if here.name == "index.md" and len(here.parts) == 1:
        page.meta["hide"] = ["navigation", "toc"]  # the home page fits on one screen
    pieces, end = [], 0
    for code in FENCED.finditer(markdown):
        pieces += [prose(markdown[end : code.start()], here, files), code[0]]
        end = code.end()
    return "".join([*pieces, prose(markdown[end:], here, files)])


def on_post_page(output: str, page: Any, config: Any) -> str:
    for url in ELSEWHERE.findall(output):
        logging.getLogger("mkdocs").warning(f"{page.file.src_uri} loads {url}: a reader's browser should only ask this site")
    return output


def prose(text: str, here: PurePosixPath, files: Files) -> str:
    """Text between code blocks."""
    return LINK.sub(lambda link: site_link(link, here, files), "\n".join(blank_lines(text.split("\n"))))


def blank_lines(lines: list[str]) -> Iterator[str]:
    """GitHub needs no blank line before a list, a table or indented code; Python-Markdown does."""
    before = ""
    for number, line in enumerate(lines):
        starts_list = re.match(r"- |\d+\. ", line) and not re.match(r"- |\d+\. |\s", before)
        starts_table = line.startswith("|") and lines[number + 1 : number + 2] and lines[number + 1].startswith("| ---")
        starts_code = line.startswith("    ") and number == 1  # right behind a fenced block
        if (before.strip() and (starts_list or starts_table)) or starts_code:
            yield ""
        yield line
        before = line


def site_link(link: re.Match[str], here: PurePosixPath, files: Files) -> str:
    """A link as the site shows it: a page by its title; a recipe on the page of recipes; any other file of the repository, which
    the site does not have, by its path."""
    text, target = link["text"], link["target"]
    path = PurePosixPath(posixpath.normpath(PurePosixPath("docs", here.parent, target)))  # from the repository's root
    to_top = "../" * (len(here.parts) - 1)
    if path.parts[0] == "docs":
        file = files.get_file_from_path(str(path.relative_to("docs")))
        is_name = not link["anchor"] and re.fullmatch(r"[\w/]+\.md", text)
        return f"[{title(file)}]({target})" if file is not None and is_name else link[0]
    if path.parts[0] == "recipes" and path.suffix in ("", ".yaml"):
        return f"[{text}]({to_top}reference/recipes.md#{reference.anchor(str(path))})"
    if path.name == "README.md" and len(path.parts) == 1:
        return f"[{text}]({to_top}index.md)"
    return f"`{path}`" if str(path).endswith(text.strip("`")) else f"{text} (`{path}`)"


def title(file: File) -> str:
    return file.content_string.partition("\n")[0].removeprefix("# ")
