-- ARGV: now. Forgets expired leases and reservations; returns how many.
local reaped = redis.call('ZREMRANGEBYSCORE', key('reserved'), '-inf', now)
for _, id in ipairs(redis.call('ZRANGE', key('leases'), '-inf', now, 'BYSCORE')) do
  redis.call('ZREM', key('leases'), id)
  redis.call('DEL', key('req', id))
  reaped = reaped + 1
end
return reaped
