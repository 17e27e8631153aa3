"""When and what: who gets a place, what a step computes, and what it is expected to take."""
