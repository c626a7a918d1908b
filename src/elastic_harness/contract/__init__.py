"""The contract: everything that two processes of a job must agree on, each thing once."""
