//! The validation that the command, the tests and users' own suites share.
