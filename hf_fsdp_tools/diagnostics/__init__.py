"""Problems of a live model or a machine, as findings with code, problem and fix."""
