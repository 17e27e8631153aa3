"""Structured output: which tokens may come next.

    library.py    the llguidance library, by its C interface: calls can be broken off
    compiler.py   a constraint as a grammar of it
    matcher.py    where an output stands in its grammar, and what finding that out may take
    trial.py      a process that tries each grammar first, in a child with limits
    turns.py      which one is made next, fair between tenants
    grammars.py   all of an engine: made in side threads, kept by content
    aside.py      the requests that wait for theirs
    so_far.py     what was generated elsewhere is taken in
    filler.py     has matchers go on in a thread; nobody waits long for one

Nothing here imports llguidance before the first constraint comes.
"""
