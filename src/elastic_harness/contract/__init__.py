"""The contract: what two processes of a job must agree on, each thing once."""
