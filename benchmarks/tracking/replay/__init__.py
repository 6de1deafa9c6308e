"""The same rule over recorded histories: how often it errs, beside the rules of others."""
