"""Questions over passages: sets of passages, a question, and where the answer stands."""
