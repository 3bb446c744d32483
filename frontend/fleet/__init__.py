"""Several engines behind one frontend: who they are, how they do, and which one gets a request."""
