"""Pages: a template filled in, with the style and the script that all of them share inside, so that each is one file."""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256
from importlib import resources
from typing import Any

from reactivate.errors import UsageError

_STYLE, _SCRIPT = "page.css", "page.js"


def rendered(template: str, **values: Any) -> str:
    """Return a page: the template in a file of this name, with values filled in.

    Raises:
        UsageError: jinja2 is not installed.
    """
    jinja2 = _jinja2()
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    script = _resource(_SCRIPT)
    page: str = environment.from_string(_resource(template)).render(
        style=_resource(_STYLE),
        script=script,
        script_hash=b64encode(sha256(script.encode()).digest()).decode(),
        **values,
    )
    return page


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _jinja2() -> Any:
    try:
        import jinja2
    except ImportError as error:
        raise UsageError(
            "A page is filled in by jinja2, which is not installed: `pip install matplotlib jinja2`. Without it there "
            "is `plan.save(path)`, which writes JSON."
        ) from error
    return jinja2
