"""`python -m deploy.observability.grafana.make_dashboards`: dashboards as Grafana reads them."""

import json
import sys
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from deploy.observability.grafana.pages import PAGES
from deploy.observability.grafana.panels import Page, dashboard

FOLDER = Path(__file__).parent / "dashboards"


def document(page: Page) -> str:
    """One dashboard's file."""
    return json.dumps(dashboard(page).build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def file_of(page: Page) -> Path:
    return FOLDER / f"{page.uid}.json"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for page in PAGES:
        file_of(page).write_text(document(page))
    print(FOLDER, file=sys.stderr)
