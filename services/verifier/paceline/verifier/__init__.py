"""The verifier: scores drafts with the target model and commits what it chose."""
