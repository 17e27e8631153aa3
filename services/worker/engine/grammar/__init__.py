"""Structured output: which tokens may come next.

    compiler.py   a constraint as a grammar of the llguidance library, and a Matcher on it
    trial.py      a process that tries each grammar first, in a child with limits
    turns.py      which one is made next, fair between tenants
    grammars.py   all of an engine: made in side threads, kept by content
    aside.py      the requests that wait for theirs
    filler.py     fills masks in a thread; nobody waits long for one

Nothing here imports llguidance before the first constraint comes.
"""
