"""The pages docs/reference/*.md: a line `::: allred.name` there becomes signature and docstring, by mkdocstrings.

`Names` is an extension of griffe, which reads the sources. It converts docstrings to Markdown and leaves out what is
private. `on_page_markdown` is a hook of mkdocs. It writes a line for each name into the index.
"""

import pathlib
import re
import sys

import griffe

SITE = pathlib.Path(__file__).parent
sys.path.append(str(SITE))
import docstrings  # noqa: E402
import write_settings  # noqa: E402

PAGES = {path.name: path.read_text() for path in sorted((SITE.parent / "reference").glob("*.md"))}
ENTRY = re.compile(r"^::: (\S+)$", flags=re.MULTILINE)
ENTRIES = [name for text in PAGES.values() for name in ENTRY.findall(text)]


class Names(griffe.Extension):
    def on_package(self, *, pkg, loader, **_):
        self.converted = set()
        find = pkg.modules_collection.get_member
        for name in ENTRIES:
            obj = find(name)
            value = str(getattr(obj, "value", ""))
            if value.startswith("_") and value.endswith("()"):  # the only instance of a private class, which is called
                kind = obj.module.members[value[:-2]]
                kind.members["__init__"], kind.name = kind.members["__call__"], obj.name
                obj.module.set_member(obj.name, kind)
        loader.resolve_aliases()
        for name in ENTRIES:
            if (obj := find(name)).is_module:  # allred.data.batches: a function, which hides its module
                obj.parent.members[obj.name] = griffe.Alias(obj.name, obj.members[obj.name], parent=obj.parent)
        self.documented = {find(name).canonical_path for name in ENTRIES}
        for name in ENTRIES:
            obj = find(name)
            self.convert(obj.final_target if obj.is_alias else obj)

    def convert(self, obj):
        """Prepare a function, class or attribute."""
        if obj.path in self.converted:
            return
        self.converted.add(obj.path)
        if obj.is_class:
            self.convert_class(obj)
        names = {parameter.name for parameter in getattr(obj, "parameters", ())} | set(obj.members)
        if obj.docstring:
            obj.docstring.value = linked(docstrings.markdown(obj.docstring.value, names))
        for parameter in getattr(obj, "parameters", ()):
            if str(parameter.default).startswith("_"):
                parameter.default = "..."

    def convert_class(self, kind):
        """Give a class the methods of bases without an entry, and remove these bases."""
        bases = [base for base in kind.mro() if base.canonical_path not in self.documented]
        for base in bases:
            for name, member in base.members.items():
                kind.members.setdefault(name, griffe.Alias(name, member, parent=kind))
        kind.bases = [base for base in kind.bases if getattr(base, "canonical_path", "") in self.documented]
        for name, member in list(kind.members.items()):
            if member.docstring and member.docstring.value.startswith("Internal"):
                del kind.members[name]
            elif not name.startswith("_") or name == "__init__":
                self.convert(member.final_target if member.is_alias else member)


def linked(text):
    """Replace names that have an entry, and names of pages, by links."""

    def link(found):
        return f"[{found[0]}][{found[1]}]" if found[1] in ENTRIES else found[0]

    return write_settings.linked(re.sub(r"`(allred\.[\w.]+)(?:\(\))?`", link, text), "../")


def on_page_markdown(markdown, page, config, files):
    """Write into the index, below the link to each page, its names with the first sentences of their docstrings."""
    if page.file.src_uri != "reference/index.md":
        return None
    python = config.plugins["mkdocstrings"].get_handler("python")

    def line(name):
        text = python.collect(name, python.get_options({})).docstring.value
        sentence = re.split(r"(?<=\.)\s|:?\n\n", text, maxsplit=1)[0]
        return f"- [`{name}`][{name}]: {sentence}"

    def names(found):
        return "\n".join([found[0], "", *map(line, ENTRY.findall(PAGES[found[1]]))])

    return re.sub(r"^## \[.+\]\((\w+\.md)\)$", names, markdown, flags=re.MULTILINE)
