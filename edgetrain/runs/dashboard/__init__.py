"""Runs in a browser: a process of its own that reads run folders. `follow` and `hall` read, `guard`
decides who may, `app` answers, `serve` listens. `runs/looking.py` starts one beside a run.

Only `app` and `serve` import Starlette and uvicorn, inside functions. Nothing that runs is asked;
what a page tells a hub goes through a function that is handed in.
"""
