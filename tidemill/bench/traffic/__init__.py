"""The load generator of `tidemill bench serve`: when to ask, what, whom, and what came of it."""
