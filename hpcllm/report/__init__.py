"""What became of a run, as one page: `python -m hpcllm report RUN [RUN ...]`. Without MPI and torch.

    run folder -- log.py, runs.py --> Run -- facts.py --> numbers --+-- sections.py, comparison.py --> page.py: HTML
                  log.jsonl           |                            `-- --json
                  run.toml, trace/    `-- curves.py, bars.py: pictures, SVG inside the page

The page has no scripts and asks for nothing from elsewhere: it can be mailed, printed and kept.
"""
