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
            done.append("```pycon\n" + narrow_code(re.sub(r" +# doctest: .*", "", block)) + "\n```")
        elif (section := SECTION.match(head)) and rest:
            done += [f"**{section[1]}**", section_body(section[1], textwrap.dedent(rest), names)]
        elif block:
            done += prose(block, names)
    return "\n\n".join(done)


def narrow_code(code):
    """Break lines that are too wide: trailing comments go to a line of their own, arguments are spread over lines.

    >>> print(narrow_code("f(x)" + " " * 50 + "# returns x, which is an array"))
    # returns x, which is an array
    f(x)
    """
    return "\n".join(narrow for line in code.splitlines() for narrow in narrow_line(line))


def narrow_line(line):
    """Return the lines for one line of code or of output.

    >>> print(*narrow_line("result = function(" + "argument, " * 8 + "last)"), sep="\\n")
    result = function(
        argument, argument, argument, argument, argument, argument, argument,
        argument, last
    )
    """
    if len(line) <= CODE_COLUMNS:
        return [line]
    prompt, indent, code = re.match(r"((?:>>>|\.\.\.) |)( *)(.*)$", line).groups()
    if found := re.match(r"(.*?\S) +(# .*)$", code):
        statement, comment = found.groups()
        first = prompt + indent
        comments = textwrap.wrap(comment, CODE_COLUMNS, initial_indent=first, subsequent_indent=f"{first}# ")
        return [*comments, *narrow_line(first + statement)]
    later = "... " + indent if prompt else indent
    head, inside, tail = longest_bracket(code)
    if not inside or len(prompt + indent + head) > CODE_COLUMNS:
        return textwrap.wrap(line, CODE_COLUMNS, subsequent_indent=later, break_long_words=False)
    deeper = later + "    "
    items = textwrap.wrap(inside, CODE_COLUMNS, initial_indent=deeper, subsequent_indent=deeper, break_long_words=False)
    return [prompt + indent + head, *items, later + tail]


def longest_bracket(code):
    """Split code around its longest outermost pair of brackets; ("", "", code) if there is none.

    >>> longest_bracket('f(1)["a(", 2]')
    ('f(1)[', '"a(", 2', ']')
    """
    begins, best = [], (0, 0)
    for found in re.finditer(r"""'[^']*'|"[^"]*"|[(\[{]|[)\]}]""", code):
        if found[0] in "([{":
            begins.append(found.end())
        elif found[0] in ")]}" and begins:
            begin = begins.pop()
            if not begins and found.start() - begin > best[1] - best[0]:
                best = begin, found.start()
    return code[: best[0]], code[best[0] : best[1]], code[best[1] :]


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
