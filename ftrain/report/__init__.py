"""What a recipe will do, before it does it: layout, collectives and memory on any number of ranks, without a device.

planned.py     ranks that do not exist          layout.py     where every parameter lies
ledger.py      what code allocates and sends    traffic.py    the collectives of a step
rehearsal.py   one step, on the meta device     memory.py     what a rank holds
depth.py       deep models from shallow ones    holdings.py   how much each rank holds
inspection.py  all of it, or every problem
as_json.py, render.py, as_html.py, words.py     what is printed, and the page
"""

from ftrain.report.as_html import as_html, problems_as_html
from ftrain.report.as_json import as_json
from ftrain.report.inspection import Inspection, inspect
from ftrain.report.render import render

__all__ = ["Inspection", "as_html", "as_json", "inspect", "problems_as_html", "render"]
