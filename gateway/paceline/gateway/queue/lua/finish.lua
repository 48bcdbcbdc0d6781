-- ARGV: now, id, owner, served tokens. Ends a request of this owner in whatever state; 1 if there was one.
local id, served = ARGV[2], tonumber(ARGV[4])
local row = redis.call('HMGET', key('req', id), 'state', 'class', 'tenant', 'kv_tokens', 'owner')
if row[1] and row[5] ~= ARGV[3] then return 0 end
redis.call('ZREM', key('reserved'), id)
redis.call('ZREM', key('leases'), id)
if not row[1] then return 0 end
if row[1] == 'waiting' then leave_line(id, row[2], row[3]) end
if row[1] == 'leased' then charge(row[2], row[3], served - tonumber(row[4])) end
redis.call('DEL', key('req', id))
return 1
