"""Who may do what: principals with tokens, their tenants and verbs, from the file of ``--auth``; the audit log."""
