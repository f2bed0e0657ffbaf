"""Hook of mkdocs: links to files of the project outside docs/ (../examples/x.py), as on GitHub; version, address, code.

Each such file becomes a page under project/, with links to the pages that link to it. The search leaves these out. A
link to a file that does not exist is not changed, and is a warning.
"""

import pathlib
import posixpath
import re
import tomllib

from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).parents[2]
LINK = re.compile(r"\]\(((?:\.\./)+)([\w./-]+)\)")
LANGUAGES = {".py": "python", ".json": "json", ".sbatch": "bash", ".sh": "bash", ".yaml": "yaml", ".md": "markdown"}
HIDDEN = "---\nsearch: {exclude: true}\n---\n"


def version():
    """Return allred.__version__, without an import of allred."""
    return re.search(r'^__version__ = "(.+)"$', (ROOT / "allred/__init__.py").read_text(), flags=re.MULTILINE)[1]


def on_config(config):
    """Show the version in header and footer, and the address of the source if pyproject.toml has one (urls.Source)."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    config.site_name = f"allred {version()}"
    config.copyright = f"allred {version()}, {project['license']}"
    config.repo_url = project.get("urls", {}).get("Source")
    return config


def linked(file, target):
    """Return the path in the project that a link of a page leads to, or None if it is in docs/."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(file.src_uri), target))
    return None if path.startswith("docs/") else path


def on_files(files, config):
    pages = {}  # file of the project -> pages that link to it
    for file in files.documentation_pages():
        for up, name in LINK.findall(file.content_string):
            source = linked(file, up + name)
            if source and (ROOT / source).is_file():
                pages.setdefault(source, []).append(file)
    for source, origins in sorted(pages.items()):
        language = LANGUAGES.get(pathlib.Path(source).suffix, "text")
        here = posixpath.dirname(f"project/{source}")
        back = sorted({f"[{heading(file)}]({posixpath.relpath(file.src_uri, here)})" for file in origins})
        text = (ROOT / source).read_text().rstrip()
        content = f"{HIDDEN}# {source}\n\nBack to: {', '.join(back)}\n\n~~~~~~ {language}\n{text}\n~~~~~~\n"
        files.append(File.generated(config, f"project/{source}.md", content=content))
    return files


def heading(file):
    """Return the first heading of a page."""
    found = re.search(r"^# (.+)$", file.content_string, flags=re.MULTILINE)
    return found[1].replace("`", "") if found else file.name


def on_page_markdown(markdown, page, config, files):
    def link(found):
        source = linked(page.file, found[1] + found[2])
        here = source and files.get_file_from_path(f"project/{source}.md")
        if not here:
            return found[0]
        return f"]({posixpath.relpath(here.src_uri, posixpath.dirname(page.file.src_uri) or '.')})"

    return LINK.sub(link, markdown)


def on_page_content(html, page, config, files):
    """In code within a line, words such as --hosts do not break at a hyphen, if they fit on a narrow screen."""

    def unbroken(found):
        return re.sub(r"(?<!\S)(?=\S*-)[^\s<]{2,30}(?!\S)", r'<span class="word">\g<0></span>', found[0])

    return re.sub(r"(?<=<code>)[^<]+(?=</code>)", unbroken, html)


def on_post_template(output_content, template_name, config):
    """The page for an unknown address: relative addresses, so that the site may lie in a folder of a server."""
    if template_name == "404.html":
        relative = re.sub(r'(href|src)="/(?!/)', r'\1="', output_content)
        return relative.replace('"base": "/"', '"base": "."').replace('"search": "/', '"search": "')
    return output_content
