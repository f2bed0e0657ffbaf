"""Converts docstrings of this project, which are plain text, to Markdown.

Lines `name: text` (arguments, attributes) and sections "Arguments:" and the like become lists. Indented lines and lines
with `>>>` become code blocks of at most 80 columns.

    python -m doctest docs/site/docstrings.py
"""

import re
import textwrap

CODE_COLUMNS = 80
SECTION = re.compile(r"(Args|Arguments|Attributes|Raises|Returns|Example|Examples):$")
NAME_LIST = r"(\w+(?:, \w+)*): +"


def markdown(text, names):
    """Convert a docstring without indentation. `names`: arguments and attributes that a line may describe.

    >>> print(markdown("Add.\\n\\n    x + y\\n\\na: a number. b: another.\\nRaises InputError.", {"a", "b"}))
    Add.
    <BLANKLINE>
    ```python
    x + y
    ```
    <BLANKLINE>
    - `a`: a number.
    - `b`: another.
    <BLANKLINE>
    Raises InputError.
    """
    done, code = [], []
    for block in [*re.split(r"\n\s*\n", text.strip("\n")), ""]:
        if block.startswith("    "):
            code.append(block)
            continue
        if code:  # with the empty lines between them
            done.append("```python\n" + narrow_code(textwrap.dedent("\n\n".join(code))) + "\n```")
            code = []
        head, _, rest = block.partition("\n")
        if block.startswith(">>>"):
            done.append("```pycon\n" + re.sub(r" +# doctest: .*", "", block) + "\n```")
        elif (section := SECTION.match(head)) and rest:
            done += [f"**{section[1]}**", section_body(section[1], textwrap.dedent(rest), names)]
        elif block:
            done += prose(block, names)
    return "\n\n".join(done)


def narrow_code(code):
    """Move trailing comments of lines that are too wide to a line of their own.

    >>> print(narrow_code("f(x)" + " " * 50 + "# returns x, which is an array"))
    # returns x, which is an array
    f(x)
    """
    lines = []
    for line in code.splitlines():
        found = re.match(r"(\s*)(.*?\S) +(# .*)$", line)
        if len(line) > CODE_COLUMNS and found:
            indent, statement, comment = found.groups()
            lines += textwrap.wrap(
                comment.strip(), CODE_COLUMNS, initial_indent=indent, subsequent_indent=indent + "# "
            )
            line = indent + statement
        lines.append(line)
    return "\n".join(lines)


def section_body(title, text, names):
    if title.startswith("Example"):
        return markdown(text, names)
    if title == "Returns":
        return " ".join(text.split())
    return "\n".join(item(line) for line in re.split(r"\n(?=\S)", text))


def item(text):
    """Return `name: text` as an item of a list."""
    names, _, rest = text.partition(":")
    return f"- `{names}`: {' '.join(rest.split())}"


def prose(block, names):
    """Return the paragraphs of a block, and a list of its parts that begin with names."""
    begins = re.compile(rf"(?:(?<=^)|(?<=\n)|(?<=[.;)] ))(?={NAME_LIST})")
    pieces, start = [], 0
    for found in begins.finditer(block):
        if all(name in names for name in re.match(NAME_LIST, block[found.start() :])[1].split(", ")):
            pieces.append(block[start : found.start()])
            start = found.start()
    pieces.append(block[start:])
    paragraphs = paragraphs_of(pieces[0], r"\n(?=Raises )") if pieces[0].strip() else []
    items = []
    for piece in pieces[1:]:
        # A new sentence at the beginning of a line ends the item.
        first, *rest = paragraphs_of(piece, r"\n(?=Raises )|(?<=\.)\n(?=[A-Z])")
        items.append(item(first))
        if rest:
            paragraphs += ["\n".join(items), *rest]
            items = []
    return [*paragraphs, *(["\n".join(items)] if items else [])]


def paragraphs_of(text, between):
    return [" ".join(part.split()) for part in re.split(between, text) if part.strip()]
