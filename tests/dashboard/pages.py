"""The console's pages without a browser."""

from concurrent.futures import wait

from streamlit.testing.v1 import AppTest
from streamlit.testing.v1.element_tree import Button
from streamlit.util import calc_hash

LONG_S = 20.0


def opened(page: AppTest, path: str, **address: str) -> AppTest:
    """The page of that path, as its address has it; not yet run."""
    page._page_hash = calc_hash(path)
    page.query_params.clear()
    for name, value in address.items():
        page.query_params[name] = value
    return page


def html(page: AppTest) -> str:
    return " ".join(element.value for element in page.get("html"))


def links(page: AppTest) -> list[tuple[str, str]]:
    """Label and address of each link to another page."""
    return [(link.proto.label, f"{link.proto.page}?{link.proto.query_string}") for link in page.get("page_link")]


def button(page: AppTest, key: str) -> Button:
    return page.button(key=key)


def has(page: AppTest, key: str) -> bool:
    return any(b.key == key for b in page.button)


def finish(page: AppTest, name: str = "operations") -> AppTest:
    """Wait for the confirmed actions and show their results."""
    wait([operation.future for operation in page.session_state[name]], LONG_S)
    return page.run()
