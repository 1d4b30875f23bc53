"""Access control and the audit log. The file of ``--auth`` lists principals with their tokens, tenants and verbs."""
