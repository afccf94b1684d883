"""Pages that show what became of runs: `python -m hpcllm report RUN [RUN ...]`. Without MPI and torch.

    run folder -- run_folder.py --> Run -- facts.py --> numbers --+-- sections.py, comparison.py: blocks of a page
                  log.jsonl           |                           |        `-- page.py, page.html.jinja --> HTML
                  run.toml, trace/    `-- figures.py: images      `-- --json

headline.py says the run in a few sentences. hover.js, inside the page, shows values under the pointer; the page asks
for nothing from elsewhere: it can be mailed, printed and kept.
"""
