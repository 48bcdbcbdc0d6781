-- no arguments
local leases = 0
for _, text in ipairs(redis.call('HVALS', LEASES)) do
  if parse_lease(text) > now then
    leases = leases + 1
  end
end
return {redis.call('ZCARD', WAITING), leases, redis.call('HGETALL', DEPTH)}
