"""Reading and clicking pages without a browser."""

import re
from base64 import b64decode
from concurrent.futures import wait

from streamlit.testing.v1 import AppTest
from streamlit.testing.v1.element_tree import Button
from streamlit.util import calc_hash

LONG_S = 20.0


def opened(page: AppTest, path: str, **address: str) -> AppTest:
    """The page of that path and address; not yet run."""
    page._page_hash = calc_hash(path)
    page.query_params.clear()
    for name, value in address.items():
        page.query_params[name] = value
    return page


def html(page: AppTest) -> str:
    return " ".join(element.value for element in page.get("html"))


def shows(page: AppTest, *parts: str) -> bool:
    """Whether the page's HTML has all these parts and the page raised nothing; names what is missing."""
    assert not page.exception
    missing = [part for part in parts if part not in html(page)]
    assert not missing, missing
    return True


def charts(page: AppTest) -> int:
    """The number of drawings on the page."""
    return html(page).count('<div class="pp-chart">')


def drawings(shown: str) -> list[str]:
    """The SVG of each drawing."""
    return [b64decode(data).decode() for data in re.findall(r"data:image/svg\+xml;base64,([^\"]+)", shown)]


def links(page: AppTest) -> list[tuple[str, str]]:
    """Label and address of each link to another page."""
    return [(link.proto.label, f"{link.proto.page}?{link.proto.query_string}") for link in page.get("page_link")]


def button(page: AppTest, key: str) -> Button:
    return page.button(key=key)


def has(page: AppTest, key: str) -> bool:
    return any(each.key == key for each in page.button)


def confirm(page: AppTest, key: str) -> AppTest:
    """Click a button, confirm, and wait for the result."""
    button(page, key).click().run()
    button(page, "confirm").click().run()
    return finish(page)


def finish(page: AppTest) -> AppTest:
    """Wait for the confirmed actions and show their results."""
    wait([started.future for started in page.session_state["started_actions"]], LONG_S)
    return page.run()
