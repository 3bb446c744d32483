"""Who may talk to whom: certificates, keys and allowances, for both services and their clients."""
