#!/bin/sh
# What surprises: a notebook that calls sys.exit(0) half-way is a success for papermill.
#   Package   papermill 2.7.0 (with ipykernel 7.4.0, nbclient 0.11.0, nbformat 5.11.1), from the Python package index
#   Source    papermill/execute.py, raise_for_execution_errors: a SystemExit whose value is "" or "0" is passed over
#   Expected  an exception from execute_notebook (and an exit code of the command), since cells were not run
#   Happens   execute_notebook returns as if all had run, although its own metadata call the cell that exits
#             "failed" and those behind it "pending"
#   What to do  after each run look for code cells without an execution count, and call them an error
#   Output seen (Python 3.11.7)
#     papermill 2.7.0 raised nothing
#     "print('set up')": count 1, exception False, completed
#     'import sys; sys.exit(0)': count 2, exception True, failed
#     "print('measured')": count None, exception None, pending
# Fails if that changes. Needs a network; leaves nothing.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q papermill==2.7.0 ipykernel==7.4.0 nbclient==0.11.0 nbformat==5.11.1
cd "$work"
PATH="$work/venv/bin:$PATH" "$work/venv/bin/python" - <<'PY'
import nbformat
import papermill

sources = ["print('set up')", "import sys; sys.exit(0)", "print('measured')"]
notebook = nbformat.v4.new_notebook(
    cells=[nbformat.v4.new_code_cell(source) for source in sources],
    metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
)
nbformat.write(notebook, "half.ipynb")
done = papermill.execute_notebook("half.ipynb", "out.ipynb", progress_bar=False, log_output=False)
print("papermill", papermill.__version__, "raised nothing")
for cell in done.cells:
    meta = cell.metadata["papermill"]
    print(f"{cell.source!r}: count {cell.execution_count}, exception {meta['exception']}, {meta['status']}")
assert [cell.execution_count for cell in done.cells] == [1, 2, None]
assert [cell.metadata["papermill"]["status"] for cell in done.cells] == ["completed", "failed", "pending"]
PY
