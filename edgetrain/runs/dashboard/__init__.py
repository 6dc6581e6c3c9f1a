"""Runs in a browser: a process of its own that reads run folders. `follow` and `hall` read, `guard`
decides who may, `app` answers, `serve` listens, `child` starts one beside a run.

Only `app` and `serve` import Starlette and uvicorn, inside functions. Nothing that runs is asked.
"""
