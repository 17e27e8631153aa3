"""Structured output: which tokens may come next.

    compiler.py   a constraint as a grammar of the llguidance library, and a Matcher on it
    trial.py      a process with limits that tries each grammar first: some end or fill theirs
    grammars.py   all of an engine: made in a side thread, kept by content

Nothing here imports llguidance before the first constraint comes.
"""
