"""One self-contained HTML page: templates, style and script beside the code that fills them."""

from reports.html.page import write_page

__all__ = ["write_page"]
