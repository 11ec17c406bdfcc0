"""What every process shares: domain, errors, wire, policies, cost model, stores."""
