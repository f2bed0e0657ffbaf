"""Hook of mkdocs: pages may link to files of the project outside docs/ (../examples/x.py), as on GitHub.

Each such file becomes a page under project/. A link to a file that does not exist is not changed, and is a warning.
"""

import pathlib
import re

from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).parents[2]
LINK = re.compile(r"\]\(\.\./([\w./-]+)\)")
LANGUAGES = {".py": "python", ".json": "json", ".sbatch": "bash", ".sh": "bash", ".yaml": "yaml", ".md": "markdown"}


def on_files(files, config):
    names = {name for file in files.documentation_pages() for name in LINK.findall(file.content_string)}
    for name in sorted(names):
        source = ROOT / name
        if source.is_file():
            language = LANGUAGES.get(source.suffix, "text")
            text = f"# {name}\n\n~~~~~~ {language}\n{source.read_text().rstrip()}\n~~~~~~\n"
            files.append(File.generated(config, f"project/{name}.md", content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    def link(found):
        here = files.get_file_from_path(f"project/{found[1]}.md")
        return f"](project/{found[1]}.md)" if here else found[0]

    return LINK.sub(link, markdown)
