"""Extension of griffe: docstrings of this project, which are plain text, as Markdown.

Lines `name: text`, of arguments and attributes, become a list, and so do sections "Arguments:" and the like; indented
lines and `>>>` become code. Two kinds of names are shown as what a user meets under them: an instance of a private
class, as allred.distributed, as the function that it is; and a function that has its module's name, as
allred.data.batches, as the function.
"""

import re
import textwrap

import griffe

SECTION = re.compile(r"(Arguments|Attributes|Raises|Returns):$")
NAME_LIST = r"(\w+(?:, \w+)*): +"


class HouseStyle(griffe.Extension):
    def on_package(self, *, pkg, loader, **kwargs):
        modules = list(modules_of(pkg))
        for module in modules:
            for item in [module, *members_of(module)]:
                if item.docstring is not None:
                    item.docstring.value = markdown(item.docstring.value, names_of(item))
        moved = {}
        for module in modules:
            moved |= called(module) | hidden(module)
        for module in modules:
            for name, member in list(module.members.items()):
                target = moved.get(member.target_path if member.is_alias else member.path)
                if target is not None and target is not member:
                    module.set_member(name, griffe.Alias(name, target, parent=module))


def modules_of(module):
    yield module
    for member in module.members.values():
        if not member.is_alias and member.is_module:
            yield from modules_of(member)


def members_of(parent):
    """All that is in a module or class, and no module."""
    for member in parent.members.values():
        if not member.is_alias and not member.is_module:
            yield member
            if member.is_class:
                yield from members_of(member)


def called(module):
    """{path: class} of what is an instance of a private class with __call__, whose signature the class then has."""
    found = {}
    for attribute in module.attributes.values():
        kind = module.classes.get(str(attribute.value).removesuffix("()"))
        if kind is not None and kind.name.startswith("_") and "__call__" in kind.members:
            call = kind.members.pop("__call__")
            call.name = "__init__"
            kind.set_member("__init__", call)
            kind.name = attribute.name
            found[attribute.path] = kind
    return found


def hidden(module):
    """{path: object} of what is in a submodule that hides a public name of this module, and of that name."""
    found = {}
    for name in module.exports or ():
        member = module.members[str(name)]
        if not member.is_alias and member.is_module and name in member.members:
            found |= {f"{member.path}.{other}": item for other, item in member.members.items()}
            found[member.path] = member.members[name]
    return found


def names_of(obj):
    """What a line `name: text` may be about."""
    if obj.is_function:
        return {p.name.lstrip("*") for p in obj.parameters}
    if obj.is_class:
        call = obj.members.get("__call__")
        given = [*obj.parameters, *(call.parameters if call else ())]
        return {p.name.lstrip("*") for p in given} | set(obj.members)
    return set()


def markdown(text, names):
    """A docstring, its indentation taken away, as Markdown.

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
            done.append("```python\n" + textwrap.dedent("\n\n".join(code)) + "\n```")
            code = []
        head, _, rest = block.partition("\n")
        if block.startswith(">>>"):
            done.append("```pycon\n" + re.sub(r" +# doctest: .*", "", block) + "\n```")
        elif (section := SECTION.match(head)) and rest:
            done += [f"**{section[1]}**", section_body(section[1], textwrap.dedent(rest))]
        elif block:
            done += prose(block, names)
    return "\n\n".join(done)


def section_body(title, text):
    if title == "Returns":
        return " ".join(text.split())
    return "\n".join(item(line) for line in re.split(r"\n(?=\S)", text))


def item(text):
    """`name: text` as an item of a list."""
    names, _, rest = text.partition(":")
    return f"- `{names}`: {' '.join(rest.split())}"


def prose(block, names):
    """Its paragraphs, and a list where names stand at the beginning of a line or sentence."""
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
        # What begins a line and a sentence is not of the item any more.
        first, *rest = paragraphs_of(piece, r"\n(?=Raises )|(?<=\.)\n(?=[A-Z])")
        items.append(item(first))
        if rest:
            paragraphs += ["\n".join(items), *rest]
            items = []
    return [*paragraphs, *(["\n".join(items)] if items else [])]


def paragraphs_of(text, between):
    return [" ".join(part.split()) for part in re.split(between, text) if part.strip()]
